#include "index_int.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#define NONE KVDEV_SLOT_NONE
#define WAYS KVDEV_HASH_WAYS
#define LOOKAHEAD KVDEV_INDEX_LOOKAHEAD
#define LINE_LOAD 5u /* slots for each line: one key in forty is not in its home line, one line in eight full */
#define PASSED_MAX 0xffffu
#define EMPTY 0u
#define GIVEN_UP 1u
#define UNSURE (NONE - 1) /* no slot: the key may be in a further line */

_Static_assert(WAYS * sizeof(uint64_t) == 64, "a line of prints is a cache line");

void kvdev_image_init(struct kvdev_image *image, uint8_t *blocks, uint32_t block_bytes)
{
    unsigned bits = 0;
    uint32_t per_block = kvdev_table_entries_per_block(block_bytes);
    while (1u << bits < per_block) {
        bits++;
    }
    image->blocks = blocks;
    image->block_bytes = block_bytes;
    image->per_block = per_block;
    /* Exact for slots below 2^31, as the error of the rounded-up quotient stays below 2^shift / 2^31. */
    image->shift = 31 + bits;
    image->magic = ((uint64_t)1 << image->shift) / per_block + 1;
}

int kvdev_hash_init(struct kvdev_hash *hash, uint32_t slot_count, const uint8_t *uuid)
{
    uint64_t words[2];
    memcpy(words, uuid, sizeof(words));
    hash->line_count = slot_count / LINE_LOAD + 2;
    /* Odd constants, each with half of the UUID: whoever chooses keys does not know it, and cannot choose
     * ones that share a mark. */
    hash->seed[0] = words[0] ^ 0x9e3779b97f4a7c15ull;
    hash->seed[1] = words[1] ^ 0xc2b2ae3d27d4eb4full;
    hash->seed[2] = words[0] ^ 0xd6e8feb86659fd93ull;
    hash->seed[3] = words[1] ^ 0xa0761d6478bd642full;
    hash->prints = kvdev_index_alloc((size_t)hash->line_count * WAYS * sizeof(*hash->prints));
    hash->slots = kvdev_index_alloc((size_t)hash->line_count * WAYS * sizeof(*hash->slots));
    hash->passed = kvdev_index_alloc((size_t)hash->line_count * sizeof(*hash->passed));
    if (hash->prints == NULL || hash->slots == NULL || hash->passed == NULL) {
        return -ENOMEM;
    }
    kvdev_hash_clear(hash);
    return 0;
}

void kvdev_hash_deinit(struct kvdev_hash *hash)
{
    free(hash->prints);
    free(hash->slots);
    free(hash->passed);
}

void kvdev_hash_clear(struct kvdev_hash *hash)
{
    memset(hash->prints, 0, (size_t)hash->line_count * WAYS * sizeof(*hash->prints));
    memset(hash->passed, 0, (size_t)hash->line_count * sizeof(*hash->passed));
}

uint64_t kvdev_hash_bytes(const struct kvdev_hash *hash)
{
    uint64_t per_line = WAYS * (sizeof(*hash->prints) + sizeof(*hash->slots)) + sizeof(*hash->passed);
    return hash->line_count * per_line;
}

/* Both halves of a 64 by 64 bit product, folded. */
static inline uint64_t fold(uint64_t a, uint64_t b)
{
    __extension__ typedef unsigned __int128 uint128;
    uint128 product = (uint128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t word_at(const uint8_t *key, size_t index)
{
    uint64_t word;
    memcpy(&word, key + index * sizeof(word), sizeof(word));
    return word;
}

static inline struct kvdev_mark mark_of(const struct kvdev_hash *hash, const uint8_t *key)
{
    /* Word by word: an array of all four would go through memory. */
    uint64_t low = fold(word_at(key, 0) ^ hash->seed[0], word_at(key, 1) ^ hash->seed[1]);
    uint64_t high = fold(word_at(key, 2) ^ hash->seed[2], word_at(key, 3) ^ hash->seed[3]);
    uint64_t print = fold(low ^ hash->seed[1], high ^ hash->seed[2]);
    uint64_t place = (low ^ (high << 29 | high >> 35)) * 0x9e3779b97f4a7c15ull >> 32;
    return (struct kvdev_mark){
        .print = print > GIVEN_UP ? print : print + 2,
        .home = (uint32_t)(place * hash->line_count >> 32),
    };
}

struct kvdev_mark kvdev_hash_mark(const struct kvdev_hash *hash, const uint8_t *key)
{
    return mark_of(hash, key);
}

void kvdev_hash_prefetch(const struct kvdev_hash *hash, struct kvdev_mark mark)
{
    __builtin_prefetch(&hash->prints[(size_t)mark.home * WAYS], 1);
    __builtin_prefetch(&hash->slots[(size_t)mark.home * WAYS], 1);
}

static inline uint32_t next_line(const struct kvdev_hash *hash, uint32_t line)
{
    return line + 1 == hash->line_count ? 0 : line + 1;
}

/* Places of a line that hold the print, a bit each. */
static inline uint32_t matches(const struct kvdev_hash *hash, uint32_t line, uint64_t print)
{
    const uint64_t *prints = &hash->prints[(size_t)line * WAYS];
    uint32_t bits = 0;
#ifdef __SSE2__
    __m128i wanted = _mm_set1_epi64x((long long)print);
    for (uint32_t i = 0; i < WAYS; i += 2) {
        __m128i halves = _mm_cmpeq_epi32(_mm_load_si128((const __m128i *)(const void *)(prints + i)), wanted);
        __m128i both = _mm_and_si128(halves, _mm_shuffle_epi32(halves, 0xb1));
        bits |= (uint32_t)_mm_movemask_pd(_mm_castsi128_pd(both)) << i;
    }
#else
    for (uint32_t i = 0; i < WAYS; i++) {
        bits |= (uint32_t)(prints[i] == print) << i;
    }
#endif
    return bits;
}

/* Of two 32-byte keys, without branches: the compiler keeps it in registers. */
static inline int keys_equal(const uint8_t *a, const uint8_t *b)
{
    uint64_t x[4];
    uint64_t y[4];
    memcpy(x, a, sizeof(x));
    memcpy(y, b, sizeof(y));
    return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3])) == 0;
}

uint32_t kvdev_hash_find(const struct kvdev_hash *hash, const struct kvdev_image *image, const uint8_t *key,
                         struct kvdev_mark mark)
{
    uint32_t at = mark.home;
    /* Bounded: a turn over all lines, though one with an empty place ends it. */
    for (uint32_t turn = 0; turn < hash->line_count; turn++) {
        for (uint32_t bits = matches(hash, at, mark.print); bits != 0; bits &= bits - 1) {
            uint32_t slot = hash->slots[(size_t)at * WAYS + (uint32_t)__builtin_ctz(bits)];
            if (keys_equal(kvdev_image_entry(image, slot)->key, key)) {
                return slot;
            }
        }
        if (matches(hash, at, EMPTY) != 0) {
            break;
        }
        at = next_line(hash, at);
    }
    return NONE;
}

/* The key's home line is full, and it is not there. */
static int has_print_behind(const struct kvdev_hash *hash, struct kvdev_mark mark)
{
    uint32_t at = mark.home;
    for (uint32_t turn = 1; turn < hash->line_count; turn++) {
        at = next_line(hash, at);
        if (matches(hash, at, mark.print) != 0) {
            return 1;
        }
        if (matches(hash, at, EMPTY) != 0) {
            return 0;
        }
    }
    return 0;
}

void kvdev_hash_insert(struct kvdev_hash *hash, struct kvdev_mark mark, uint32_t slot)
{
    uint32_t at = mark.home;
    for (;;) {
        uint32_t free_places = matches(hash, at, EMPTY) | matches(hash, at, GIVEN_UP);
        if (free_places != 0) {
            size_t place = (size_t)at * WAYS + (uint32_t)__builtin_ctz(free_places);
            hash->prints[place] = mark.print;
            hash->slots[place] = slot;
            return;
        }
        if (hash->passed[at] != PASSED_MAX) {
            hash->passed[at]++;
        }
        at = next_line(hash, at);
    }
}

/* Give back what `enter` counted on its way from the home line to this one. */
static void uncount(struct kvdev_hash *hash, uint32_t home, uint32_t end)
{
    for (uint32_t at = home; at != end; at = next_line(hash, at)) {
        if (hash->passed[at] != PASSED_MAX) {
            hash->passed[at]--;
        }
    }
}

uint32_t kvdev_hash_enter(struct kvdev_hash *hash, const struct kvdev_image *image, struct kvdev_mark mark,
                          uint32_t slot)
{
    const uint8_t *key = kvdev_image_entry(image, slot)->key;
    for (uint32_t at = mark.home;; at = next_line(hash, at)) {
        for (uint32_t bits = matches(hash, at, mark.print); bits != 0; bits &= bits - 1) {
            uint32_t rival = hash->slots[(size_t)at * WAYS + (uint32_t)__builtin_ctz(bits)];
            if (keys_equal(kvdev_image_entry(image, rival)->key, key)) {
                uncount(hash, mark.home, at);
                return rival;
            }
        }
        uint32_t empty = matches(hash, at, EMPTY);
        if (empty != 0) {
            size_t place = (size_t)at * WAYS + (uint32_t)__builtin_ctz(empty);
            hash->prints[place] = mark.print;
            hash->slots[place] = slot;
            return NONE;
        }
        if (hash->passed[at] != PASSED_MAX) {
            hash->passed[at]++;
        }
    }
}

/* No key is behind the line for want of room in it any more: its places given up end a search again. */
static void end_passing(struct kvdev_hash *hash, uint32_t line)
{
    for (uint32_t bits = matches(hash, line, GIVEN_UP); bits != 0; bits &= bits - 1) {
        hash->prints[(size_t)line * WAYS + (uint32_t)__builtin_ctz(bits)] = EMPTY;
    }
}

void kvdev_hash_delete(struct kvdev_hash *hash, struct kvdev_mark mark, uint32_t slot)
{
    uint32_t at = mark.home;
    for (;;) {
        for (uint32_t bits = matches(hash, at, mark.print); bits != 0; bits &= bits - 1) {
            size_t place = (size_t)at * WAYS + (uint32_t)__builtin_ctz(bits);
            if (hash->slots[place] == slot) {
                hash->prints[place] = hash->passed[at] != 0 ? GIVEN_UP : EMPTY;
                return;
            }
        }
        if (hash->passed[at] != PASSED_MAX && --hash->passed[at] == 0) {
            end_passing(hash, at);
        }
        at = next_line(hash, at);
    }
}

void kvdev_hash_replace(struct kvdev_hash *hash, struct kvdev_mark mark, uint32_t slot, uint32_t new_slot)
{
    for (uint32_t at = mark.home;; at = next_line(hash, at)) {
        for (uint32_t bits = matches(hash, at, mark.print); bits != 0; bits &= bits - 1) {
            size_t place = (size_t)at * WAYS + (uint32_t)__builtin_ctz(bits);
            if (hash->slots[place] == slot) {
                hash->slots[place] = new_slot;
                return;
            }
        }
    }
}

/* Look into the key's line and fetch the entry that it names first; its slot, NONE or UNSURE. */
static inline uint32_t first_candidate(const struct kvdev_hash *hash, const struct kvdev_image *image,
                                       struct kvdev_mark mark)
{
    uint32_t bits = matches(hash, mark.home, mark.print);
    if (bits == 0) {
        return matches(hash, mark.home, EMPTY) != 0 ? NONE : UNSURE;
    }
    uint32_t slot = hash->slots[(size_t)mark.home * WAYS + (uint32_t)__builtin_ctz(bits)];
    __builtin_prefetch(kvdev_image_entry(image, slot));
    return slot;
}

/* Three steps run behind one another, LOOKAHEAD keys apart: fetch a key's line; look into it and fetch the
 * entry it names; compare. So the misses of many keys overlap. */
void kvdev_hash_find_group(const struct kvdev_hash *hash, const struct kvdev_image *image, const uint8_t *keys,
                           uint32_t count, uint32_t *slots)
{
    struct kvdev_mark marks[KVDEV_INDEX_GROUP];
    for (uint32_t i = 0; i < count + 2 * LOOKAHEAD; i++) {
        if (i < count) {
            marks[i] = mark_of(hash, keys + (size_t)i * 32);
            __builtin_prefetch(&hash->prints[(size_t)marks[i].home * WAYS]);
            __builtin_prefetch(&hash->slots[(size_t)marks[i].home * WAYS]);
        }
        uint32_t middle = i - LOOKAHEAD; /* wraps far above count */
        if (middle < count) {
            slots[middle] = first_candidate(hash, image, marks[middle]);
        }
        uint32_t last = i - 2 * LOOKAHEAD;
        if (last < count) {
            const uint8_t *key = keys + (size_t)last * 32;
            uint32_t slot = slots[last];
            if (slot == UNSURE || (slot != NONE && !keys_equal(kvdev_image_entry(image, slot)->key, key))) {
                slots[last] = kvdev_hash_find(hash, image, key, marks[last]);
            }
        }
    }
}

/* --- whether keys are there ------------------------------------------------------------------ */

#define STEP 16u       /* keys of one step: a bit each, and a loop without a branch */
#define STEPS_AHEAD 2u /* steps between the fetch of a line and its use: more than the misses a core keeps under way */
#define RING_STEPS 4u  /* steps whose marks are kept: those ahead, one being looked at, one being settled */
#define KEYS_AHEAD 64u /* keys are read in a row, but a processor fetches ahead within a small page only */

_Static_assert(RING_STEPS >= STEPS_AHEAD + 2 && (RING_STEPS & (RING_STEPS - 1)) == 0, "marks outlive their last use");

/* Whether one of the eight places of a line holds the print; cheaper than which. */
static inline int line_has(const uint64_t *line, uint64_t print)
{
#ifdef __SSE2__
    __m128i wanted = _mm_set1_epi64x((long long)print);
    __m128i any = _mm_setzero_si128();
    for (uint32_t i = 0; i < WAYS; i += 2) {
        __m128i halves = _mm_cmpeq_epi32(_mm_load_si128((const __m128i *)(const void *)(line + i)), wanted);
        any = _mm_or_si128(any, _mm_and_si128(halves, _mm_shuffle_epi32(halves, 0xb1)));
    }
    return _mm_movemask_epi8(any) != 0;
#else
    uint32_t any = 0;
    for (uint32_t i = 0; i < WAYS; i++) {
        any |= line[i] == print;
    }
    return any != 0;
#endif
}

/* What is known of the keys of one step. */
struct step {
    struct kvdev_mark marks[STEP];
    uint32_t is_there;
    uint32_t is_unsure; /* the home line is full and does not have it */
};

static inline uint32_t step_size(uint32_t count, uint32_t first)
{
    return count - first < STEP ? count - first : STEP;
}

static inline void fetch_step(const struct kvdev_hash *hash, const uint8_t *keys, uint32_t size, struct step *step)
{
    for (uint32_t i = 0; i < size; i++) {
        const uint8_t *key = keys + (size_t)i * 32;
        __builtin_prefetch(key + (size_t)KEYS_AHEAD * 32); /* past the end it does nothing */
        step->marks[i] = mark_of(hash, key);
        __builtin_prefetch(&hash->prints[(size_t)step->marks[i].home * WAYS]);
    }
}

static inline void look_step(const struct kvdev_hash *hash, uint32_t size, struct step *step)
{
    step->is_there = 0;
    step->is_unsure = 0;
    for (uint32_t i = 0; i < size; i++) {
        const uint64_t *line = &hash->prints[(size_t)step->marks[i].home * WAYS];
        if (line_has(line, step->marks[i].print)) {
            step->is_there |= 1u << i;
        } else if (!line_has(line, EMPTY)) {
            step->is_unsure |= 1u << i;
            __builtin_prefetch(&hash->prints[(size_t)next_line(hash, step->marks[i].home) * WAYS]);
        }
    }
}

static inline void settle_step(const struct kvdev_hash *hash, struct step *step)
{
    for (uint32_t bits = step->is_unsure; bits != 0; bits &= bits - 1) {
        uint32_t i = (uint32_t)__builtin_ctz(bits);
        step->is_there |= (uint32_t)has_print_behind(hash, step->marks[i]) << i;
    }
}

/* Keys pass through three stages, in steps that run behind one another: hash and fetch the line; look into it; look
 * behind it, which one key in forty needs. The whole batch is one run, so that misses overlap to its end. With `found`
 * every key is asked for, and the answer is how many are there; without, how many from the first on are. */
static uint32_t ask(const struct kvdev_hash *hash, const uint8_t *keys, uint32_t count, uint8_t *found)
{
    struct step ring[RING_STEPS];
    uint32_t step_count = count / STEP + (count % STEP != 0);
    uint32_t hits = 0;
    for (uint32_t at = 0; at < step_count + STEPS_AHEAD + 1; at++) {
        if (at < step_count) {
            fetch_step(hash, keys + (size_t)at * STEP * 32, step_size(count, at * STEP), &ring[at % RING_STEPS]);
        }
        uint32_t middle = at - STEPS_AHEAD; /* wraps far above the count */
        if (middle < step_count) {
            look_step(hash, step_size(count, middle * STEP), &ring[middle % RING_STEPS]);
        }
        uint32_t last = middle - 1;
        if (last >= step_count) {
            continue;
        }
        struct step *step = &ring[last % RING_STEPS];
        uint32_t size = step_size(count, last * STEP);
        settle_step(hash, step);
        if (found != NULL) {
            for (uint32_t i = 0; i < size; i++) {
                found[(size_t)last * STEP + i] = (uint8_t)(step->is_there >> i & 1);
            }
            hits += (uint32_t)__builtin_popcount(step->is_there);
        } else if (step->is_there != (1u << size) - 1) {
            return last * STEP + (uint32_t)__builtin_ctz(~step->is_there);
        }
    }
    return found != NULL ? hits : count;
}

uint32_t kvdev_hash_contains(const struct kvdev_hash *hash, const uint8_t *keys, uint32_t count, uint8_t *found)
{
    return ask(hash, keys, count, found);
}

uint32_t kvdev_hash_prefix(const struct kvdev_hash *hash, const uint8_t *keys, uint32_t count)
{
    return ask(hash, keys, count, NULL);
}

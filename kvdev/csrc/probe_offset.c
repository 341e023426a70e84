#include "probe_int.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define ZETA_TERMS_MAX 10000000u      /* more terms change the sum less than a block's popularity is known */
#define SCATTER 0x9E3779B97F4A7C15u   /* odd: ranks next to each other lie far apart */
#define FIT_TRIES_MAX 64

/* ---- random numbers: xoshiro256**, seeded by splitmix64 ---- */

static uint64_t rotate(uint64_t x, int bits)
{
    return (x << bits) | (x >> (64 - bits));
}

uint64_t probe_random_next(struct probe_random *random)
{
    uint64_t *s = random->state;
    uint64_t result = rotate(s[1] * 5, 7) * 9;
    uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate(s[3], 45);
    return result;
}

/* From 0 to below 1. */
double probe_random_unit(struct probe_random *random)
{
    return (double)(probe_random_next(random) >> 11) * 0x1.0p-53;
}

static uint64_t random_below(struct probe_random *random, uint64_t limit)
{
    return (uint64_t)(((unsigned __int128)probe_random_next(random) * limit) >> 64);
}

void probe_random_seed(struct probe_random *random, uint64_t seed)
{
    for (int i = 0; i < 4; i++) {
        uint64_t x = seed += 0x9E3779B97F4A7C15u;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
        random->state[i] = x ^ (x >> 31);
    }
}

/* ---- the map ---- */

static int map_init(struct probe_map *map, uint64_t block_count)
{
    uint64_t total = 0, words = block_count;
    map->block_count = block_count;
    do {
        words = (words + 63) / 64;
        map->level_words[map->level_count++] = words;
        total += words;
    } while (words > 1 && map->level_count < PROBE_MAP_LEVELS);
    map->words = calloc(total, sizeof *map->words);
    if (!map->words)
        return -ENOMEM;
    map->total_words = total;
    for (uint32_t i = 0, at = 0; i < map->level_count; i++) {
        map->level[i] = map->words + at;
        at += (uint32_t)map->level_words[i];
    }
    return 0;
}

static int map_is_used(const struct probe_map *map, uint64_t block)
{
    return (int)(map->level[0][block / 64] >> (block % 64) & 1);
}

static void map_use(struct probe_map *map, uint64_t block)
{
    if (map_is_used(map, block))
        return;
    map->used_count++;
    for (uint32_t i = 0; i < map->level_count; i++) {
        uint64_t *word = &map->level[i][block / 64];
        *word |= (uint64_t)1 << (block % 64);
        if (*word != UINT64_MAX)
            return;
        block /= 64;
    }
}

static void map_clear(struct probe_map *map)
{
    memset(map->words, 0, map->total_words * sizeof *map->words);
    map->used_count = 0;
}

/* The first free block from `from` on; block_count if there is none. */
static uint64_t map_free_from(const struct probe_map *map, uint64_t from)
{
    uint64_t at = from;
    uint32_t level = 0;
    for (;;) {
        uint64_t index = at / 64;
        if (index >= map->level_words[level])
            return map->block_count;
        uint64_t open = ~map->level[level][index] & (UINT64_MAX << (at % 64));
        if (open) {
            at = index * 64 + (uint64_t)__builtin_ctzll(open);
            if (!level)
                return at < map->block_count ? at : map->block_count;
            level--;
            at *= 64;
            continue;
        }
        if (level + 1 == map->level_count)
            return map->block_count;
        level++;
        at = index + 1;
    }
}

/* ---- distributions ---- */

static uint64_t zipf_rank(struct probe_sequence *s, uint64_t count)
{
    double theta = s->params->distribution_value, n = (double)count;
    double u = probe_random_unit(&s->offset_random);
    double z = u * s->zeta_n;
    if (z < 1.0)
        return 0;
    if (z < s->zeta_2)
        return 1;
    double eta = (1.0 - pow(2.0 / n, 1.0 - theta)) / (1.0 - s->zeta_2 / s->zeta_n);
    double rank = n * pow(eta * u - eta + 1.0, 1.0 / (1.0 - theta));
    return rank < n ? (uint64_t)rank : count - 1;
}

/* The mean of twelve even ones, moved by up to half the deviation. */
static uint64_t normal_block(struct probe_sequence *s, uint64_t count)
{
    const struct kvdev_probe_params *p = s->params;
    uint64_t sum = 11;
    for (int i = 0; i < 12; i++)
        sum += random_below(&s->offset_random, count + 1);
    int64_t block = (int64_t)(sum / 12);
    double width = ceil((double)count * p->distribution_value / 100.0);
    if (width > (double)(count / 2))
        width = (double)(count / 2);
    if (width > 0) {
        int64_t move = (int64_t)(width * probe_random_unit(&s->offset_random)) - (int64_t)width / 2;
        while (move && (block + move >= (int64_t)count || block + move < 0))
            move /= 2;
        block += move;
    }
    return (uint64_t)block;
}

static uint64_t random_block(struct probe_sequence *s, uint64_t count)
{
    switch (s->params->distribution) {
    case KVDEV_PROBE_ZIPF:
        return (zipf_rank(s, count) * SCATTER + s->shift) % count;
    case KVDEV_PROBE_PARETO: {
        double power = log(s->params->distribution_value) / log(1.0 - s->params->distribution_value);
        uint64_t rank = (uint64_t)((double)(count - 1) * pow(probe_random_unit(&s->offset_random), power));
        return (rank * SCATTER + s->shift) % count;
    }
    case KVDEV_PROBE_NORMAL:
        return (normal_block(s, count) * SCATTER + s->shift) % count;
    default:
        return random_below(&s->offset_random, count);
    }
}

static void zipf_prepare(struct probe_sequence *s, uint64_t count)
{
    double theta = s->params->distribution_value;
    uint64_t terms = count < ZETA_TERMS_MAX ? count : ZETA_TERMS_MAX;
    s->zeta_2 = 1.0 + pow(0.5, theta);
    s->zeta_n = 0;
    for (uint64_t i = 1; i <= terms; i++)
        s->zeta_n += pow(1.0 / (double)i, theta);
}

/* ---- the sequence ---- */

static uint64_t low_of(const struct kvdev_probe_params *p)
{
    uint64_t low = UINT64_MAX;
    for (int way = 0; way < 3; way++)
        if (p->has[way] && p->blocks[way].low < low)
            low = p->blocks[way].low;
    return low;
}

static uint64_t block_count_of(const struct probe_sequence *s, uint32_t way)
{
    const struct kvdev_probe_params *p = s->params;
    if (p->has_map)
        return p->size / s->block_unit;
    uint64_t room = p->size < p->blocks[way].low ? 0 : p->size - p->blocks[way].low;
    return room / p->blocks[way].align + 1;
}

void probe_sequence_restart(struct probe_sequence *s)
{
    const struct kvdev_probe_params *p = s->params;
    struct probe_random root;
    probe_random_seed(&root, p->seed);
    probe_random_seed(&s->offset_random, probe_random_next(&root));
    probe_random_seed(&s->size_random, probe_random_next(&root));
    probe_random_seed(&s->mix_random, probe_random_next(&root));
    probe_random_seed(&s->order_random, probe_random_next(&root));
    s->shift = probe_random_next(&root);
    if (p->distribution_center >= 0)
        s->shift = (uint64_t)((double)block_count_of(s, p->has[0] ? 0 : p->has[1] ? 1 : 2) * p->distribution_center);
    probe_sequence_loop(s);
}

void probe_sequence_loop(struct probe_sequence *s)
{
    for (int way = 0; way < 3; way++) {
        s->position[way] = 0;
        s->last_start[way] = 0;
        s->since_jump[way] = 0;
        if (s->params->sequence_add < 0 && !s->params->is_random)
            s->position[way] = s->params->size;
    }
    if (s->map.words)
        map_clear(&s->map);
}

int probe_sequence_init(struct probe_sequence *s, const struct kvdev_probe_params *p)
{
    memset(s, 0, sizeof *s);
    s->params = p;
    s->block_unit = low_of(p);
    uint32_t way = p->has[0] ? 0 : p->has[1] ? 1 : 2;
    if (p->is_random && p->has_map) {
        int error = map_init(&s->map, block_count_of(s, way));
        if (error)
            return error;
    }
    if (p->is_random && p->distribution == KVDEV_PROBE_ZIPF)
        zipf_prepare(s, block_count_of(s, way));
    probe_sequence_restart(s);
    return 0;
}

void probe_sequence_deinit(struct probe_sequence *s)
{
    free(s->map.words);
    s->map.words = NULL;
}

uint32_t probe_sequence_way(struct probe_sequence *s)
{
    const struct kvdev_probe_params *p = s->params;
    if (p->has[KVDEV_PROBE_READ] && p->has[KVDEV_PROBE_WRITE])
        return random_below(&s->mix_random, 100) < p->read_percent ? KVDEV_PROBE_READ : KVDEV_PROBE_WRITE;
    return p->has[KVDEV_PROBE_READ] ? KVDEV_PROBE_READ : p->has[KVDEV_PROBE_WRITE] ? KVDEV_PROBE_WRITE : KVDEV_PROBE_TRIM;
}

/* A length that fits between the offset and the end of the region; 0 if none does. */
static uint64_t length_at(struct probe_sequence *s, uint32_t way, uint64_t offset)
{
    const struct kvdev_probe_blocks *b = &s->params->blocks[way];
    uint64_t room = offset < s->params->size ? s->params->size - offset : 0;
    if (room < b->low)
        return 0;
    if (b->low == b->high)
        return b->low;
    for (int i = 0; i < FIT_TRIES_MAX; i++) {
        uint64_t length = b->low;
        if (b->split_count) {
            uint64_t percent = random_below(&s->size_random, 100), sum = 0;
            for (uint32_t k = 0; k < b->split_count; k++) {
                sum += b->split_percent[k];
                length = b->split_size[k];
                if (b->split_percent[k] && percent < sum)
                    break;
            }
        } else {
            length += (uint64_t)((double)b->high * probe_random_unit(&s->size_random));
            length = length > b->high ? b->high : length - length % b->low;
        }
        if (length <= room)
            return length;
    }
    return b->low;
}

static int next_random(struct probe_sequence *s, uint32_t way, struct probe_io *io)
{
    const struct kvdev_probe_params *p = s->params;
    uint64_t count = block_count_of(s, way);
    if (!s->map.words) {
        io->offset = random_block(s, count) * p->blocks[way].align;
        if (io->offset + p->blocks[way].low > p->size)
            io->offset = 0;
        io->length = length_at(s, way, io->offset);
        return io->length != 0;
    }
    while (s->map.used_count < s->map.block_count) {
        uint64_t block = map_free_from(&s->map, random_block(s, count));
        if (block == s->map.block_count)
            block = map_free_from(&s->map, 0);
        io->offset = block * s->block_unit;
        uint64_t length = length_at(s, way, io->offset), units = 0;
        if (!length) {
            map_use(&s->map, block); /* the end of the region, too short for this direction */
            continue;
        }
        while (units * s->block_unit < length && block + units < s->map.block_count &&
               !map_is_used(&s->map, block + units))
            map_use(&s->map, block + units++);
        io->length = units * s->block_unit < length ? units * s->block_unit : length;
        return 1;
    }
    return 0;
}

static int next_sequential(struct probe_sequence *s, uint32_t way, struct probe_io *io)
{
    const struct kvdev_probe_params *p = s->params;
    uint64_t at = s->position[way];
    int64_t add = p->is_random ? 0 : p->sequence_add;
    if (add < 0) {
        uint64_t back = (uint64_t)-add;
        if (at < back || at - back + p->blocks[way].low > p->size)
            return 0;
        at -= back;
    }
    io->offset = at;
    io->length = length_at(s, way, at);
    if (!io->length)
        return 0;
    s->position[way] = add < 0 ? at : at + io->length + (uint64_t)add;
    return 1;
}

int probe_sequence_next(struct probe_sequence *s, uint32_t way, struct probe_io *io)
{
    const struct kvdev_probe_params *p = s->params;
    io->way = way;
    if (way == KVDEV_PROBE_WRITE && p->has[KVDEV_PROBE_TRIM]) {
        /* trimwrite: what was trimmed last is written. */
        io->offset = s->last_start[KVDEV_PROBE_TRIM];
        io->length = s->trimmed_length;
        return 1;
    }
    int is_jump = 1;
    if (p->is_random) {
        if (p->sequence_count > 1 && s->since_jump[way] % p->sequence_count != 0)
            is_jump = 0;
        else if (p->blocks[way].percent_random < 100)
            is_jump = random_below(&s->order_random, 100) < p->blocks[way].percent_random;
        s->since_jump[way]++;
    }
    int found = 0;
    if (!p->is_random) {
        found = next_sequential(s, way, io);
    } else if (!is_jump && p->is_identical) {
        io->offset = s->last_start[way];
        io->length = length_at(s, way, io->offset);
        found = 1;
    } else {
        if (!is_jump)
            found = next_sequential(s, way, io);
        if (!found)
            found = next_random(s, way, io);
        if (found)
            s->position[way] = io->offset + io->length;
    }
    if (!found)
        return 0;
    s->last_start[way] = io->offset;
    if (way == KVDEV_PROBE_TRIM)
        s->trimmed_length = io->length;
    return 1;
}

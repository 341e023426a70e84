/* What the parts of the probe engine share: generators of offsets (probe_offset.c), payload and its check
 * (probe_verify.c), statistics (probe_stat.c), commands (probe_issue.c), pace (probe_pace.c), the job's loop (probe.c). */
#ifndef KVDEV_PROBE_INT_H
#define KVDEV_PROBE_INT_H

#include <stdatomic.h>
#include <time.h>

#include "probe.h"

struct probe_random {
    uint64_t state[4];
};

/* A map of blocks, 64 to a word, with a word of "all used" bits over each 64 words: the next free one is found in a
 * few steps however full it is. */
#define PROBE_MAP_LEVELS 8

struct probe_map {
    uint64_t *words;
    uint64_t *level[PROBE_MAP_LEVELS];
    uint64_t level_words[PROBE_MAP_LEVELS];
    uint64_t block_count;
    uint64_t used_count;
    uint64_t total_words;
    uint32_t level_count;
};

struct probe_io {
    uint64_t offset;
    uint64_t length;
    uint32_t way;
};

/* Everything that the sequence of I/Os depends on: started again with the same seed it is the same sequence. */
struct probe_sequence {
    const struct kvdev_probe_params *params;
    struct probe_random offset_random;
    struct probe_random size_random;
    struct probe_random mix_random;
    struct probe_random order_random;
    struct probe_map map;
    uint64_t position[3];
    uint64_t last_start[3];
    uint64_t trimmed_length;
    uint64_t since_jump[3];
    uint64_t block_unit;           /* of the map */
    double zeta_n;
    double zeta_2;
    uint64_t shift;                /* where the most popular block is */
};

uint64_t probe_random_next(struct probe_random *random);
double probe_random_unit(struct probe_random *random);
void probe_random_seed(struct probe_random *random, uint64_t seed);

int probe_sequence_init(struct probe_sequence *sequence, const struct kvdev_probe_params *params);
void probe_sequence_deinit(struct probe_sequence *sequence);
void probe_sequence_restart(struct probe_sequence *sequence);
/* Forget which blocks were used and where the job was, not the random numbers: the next loop. */
void probe_sequence_loop(struct probe_sequence *sequence);
/* KVDEV_PROBE_READ, WRITE or TRIM, by the mix. */
uint32_t probe_sequence_way(struct probe_sequence *sequence);
/* The next I/O of that direction; 0 when the region has been passed and nothing starts it again. */
int probe_sequence_next(struct probe_sequence *sequence, uint32_t way, struct probe_io *ret);

struct probe_bad {
    uint64_t offset;
    uint64_t interval;
    uint64_t count;
    uint32_t reason;
};

void probe_fill_random(uint8_t *buf, uint64_t length, uint64_t seed);
void probe_fill_verified(const struct kvdev_probe_params *params, uint8_t *buf, uint64_t offset, uint64_t length,
                         uint64_t seed);
void probe_fill_pattern(const struct kvdev_probe_params *params, uint8_t *buf, uint64_t length);
/* is_own: this run has written here. The first bad interval in *ret, and how many there are. */
void probe_check(const struct kvdev_probe_params *params, const uint8_t *buf, uint64_t offset, uint64_t length,
                 int is_own, struct probe_bad *ret);

void probe_stat_add(struct kvdev_probe_stat *stat, uint64_t value);
void probe_spread_add(struct kvdev_probe_result *result, uint64_t clat_ns);
uint32_t probe_batch_index(uint32_t count);
uint32_t probe_depth_index(uint32_t depth);

enum probe_phase { PHASE_WAIT, PHASE_RUN, PHASE_SYNC, PHASE_VERIFY, PHASE_ENDED };

#define KIND_IO 0
#define KIND_SYNC 1
#define KIND_VERIFY 2

struct probe_slot {
    uint64_t start_ns;
    uint64_t issue_ns;
    uint64_t offset;
    uint64_t length;
    uint8_t *buffer;
    uint32_t way;
    uint32_t kind;
    uint32_t remaining;     /* commands on their way */
    int32_t error;
    uint16_t status;
    uint8_t is_issued;
    uint8_t is_inline;      /* all of it was done by the time it was issued */
};

/* How far the generator has come. */
struct probe_progress {
    uint64_t bytes;
    uint64_t ios;
    uint64_t loops;
    int is_over;
};

struct kvdev_probe {
    struct kvdev_probe_params params;
    struct kvdev_probe_member *members;
    struct kvdev_queue *queue;
    struct probe_sequence sequence;
    struct kvdev_probe_result result;
    struct probe_slot *slots;
    uint32_t *free_slots;
    uint32_t *batch_slots;
    uint32_t *ready;            /* a ring of slots done without the queue */
    struct kvdev_io *ios;
    struct kvdev_io_done *dones;
    struct kvdev_probe_log_entry *log;
    uint32_t log_head;
    uint32_t log_count;
    uint32_t free_count;
    uint32_t batch_count;
    uint32_t ready_head;
    uint32_t ready_count;
    uint32_t io_count;          /* commands of the batch */
    uint32_t piece_max;
    uint32_t in_flight;
    uint32_t depth_limit;
    enum probe_phase phase;
    struct probe_progress progress;
    uint64_t verify_ios;        /* I/Os that the verify phase goes through again; UINT64_MAX: all */
    uint64_t phase_ns;
    uint64_t payload_seed;
    struct probe_io held;       /* generated, and waiting for its time */
    int is_held;
    struct probe_io put_off[3]; /* of a mix with rates: generated, and overtaken by the other direction */
    uint8_t is_put_off[3];
    int has_ramped;
    uint64_t writes_since_sync;
    uint64_t rate_bytes[3];     /* issued since began, for the rates */
    uint64_t rate_ios[3];
    uint64_t rate_due_ns[3];    /* poisson */
    struct probe_random rate_random;
    uint64_t think_count;
    uint64_t think_until_ns;
    int is_thinking;
    uint64_t window_bw_ns, window_iops_ns, window_rate_ns;
    uint64_t window_bw_bytes[3], window_iops_ios[3], window_rate_bytes[3], window_rate_ios[3];
    uint64_t target_ns;         /* start of the window of latency_target */
    uint64_t target_ios, target_late;
    uint32_t target_low, target_high;
    int is_target_final;
    atomic_int stop;
};
#define NS_PER_S 1000000000u
#define POLL_SLICE_NS 20000000u       /* so often a job that waits looks at stop and at the clock */

static inline uint64_t probe_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * NS_PER_S + (uint64_t)ts.tv_nsec;
}

static inline int probe_is_stopped(struct kvdev_probe *probe)
{
    return atomic_load_explicit(&probe->stop, memory_order_relaxed);
}

/* probe_issue.c */
/* The next I/O of the job; 0 when there are none left. */
int probe_generate(struct kvdev_probe *probe, struct probe_io *io);
int probe_generate_way(struct kvdev_probe *probe, uint32_t way, struct probe_io *io);
/* Takes what was put off of that direction; 0 if nothing was. */
int probe_put_off_take(struct kvdev_probe *probe, uint32_t way, struct probe_io *io);
/* Puts an I/O into the batch; io is NULL for a flush. */
void probe_prepare(struct kvdev_probe *probe, uint32_t kind, const struct probe_io *io);
/* Hands the batch over, and has the queue send it. */
int probe_batch_submit(struct kvdev_probe *probe);
/* Takes completions until `want` I/Os are done or timeout_ns has passed; how many. */
uint32_t probe_reap(struct kvdev_probe *probe, uint32_t want, uint32_t most, uint64_t timeout_ns);
void probe_end_with(struct kvdev_probe *probe, uint8_t reason);

/* probe_pace.c */
uint64_t probe_rate_due(const struct kvdev_probe *probe, uint32_t way);
void probe_rate_spend(struct kvdev_probe *probe, const struct probe_io *io, uint64_t now);
void probe_rate_turn(struct kvdev_probe *probe, uint64_t now);
void probe_samples_take(struct kvdev_probe *probe, uint64_t now);
void probe_rates_check(struct kvdev_probe *probe, uint64_t now);
void probe_windows_start(struct kvdev_probe *probe, uint64_t now);
/* What has been counted so far is forgotten: the measurement begins now. */
void probe_measure_from(struct kvdev_probe *probe, uint64_t now);
void probe_target_turn(struct kvdev_probe *probe, uint64_t now);

#endif

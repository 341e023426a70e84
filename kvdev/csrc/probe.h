/* The engine of device probes: one job's I/O on one queue (or memory), generated, timed and checked in C.
 *
 * A job is driven by one thread, which calls kvdev_probe_run until it says KVDEV_PROBE_DONE. All memory is allocated
 * by create. Payload memory is the caller's again when run has said DONE, or after the queue was abandoned.
 * Threads: stop may be called, and the result read (as a picture in motion), by any other thread. */
#ifndef KVDEV_PROBE_H
#define KVDEV_PROBE_H

#include "io.h"
#include "queue.h"

/* cdef begin */
#define KVDEV_PROBE_GROUP_BITS 6          /* 64 buckets to a power of two */
#define KVDEV_PROBE_BUCKET_COUNT 1856     /* 29 groups of 64, as fio has */
#define KVDEV_PROBE_MEMBERS_MAX 256
#define KVDEV_PROBE_SPLITS_MAX 64
#define KVDEV_PROBE_PATTERN_MAX 512
#define KVDEV_PROBE_PIECES_MAX 1024       /* commands that one I/O may become */
#define KVDEV_PROBE_DEPTH_MAX 4096

#define KVDEV_PROBE_READ 0
#define KVDEV_PROBE_WRITE 1
#define KVDEV_PROBE_TRIM 2

/* What run says. */
#define KVDEV_PROBE_DONE 0        /* the job has ended, nothing is outstanding */
#define KVDEV_PROBE_LOOK 1        /* the queue's owner has to look at a device, or the slice is over; call again */
#define KVDEV_PROBE_LOG_FULL 2    /* take the log (kvdev_probe_log_take), then call again */

/* How random offsets are spread. */
#define KVDEV_PROBE_EVENLY 0
#define KVDEV_PROBE_ZIPF 1
#define KVDEV_PROBE_PARETO 2
#define KVDEV_PROBE_NORMAL 3

#define KVDEV_PROBE_VERIFY_NONE 0
#define KVDEV_PROBE_VERIFY_CRC32C 1       /* a header at the start of each interval, payload from its seed */
#define KVDEV_PROBE_VERIFY_PATTERN 2

/* What of a stored interval was wrong. */
#define KVDEV_PROBE_BAD_NONE 0
#define KVDEV_PROBE_BAD_HEADER 1          /* no header of ours, or its checksum is wrong */
#define KVDEV_PROBE_BAD_PLACE 2           /* an intact header of another place or length */
#define KVDEV_PROBE_BAD_STALE 3           /* of another run, though this one has written here */
#define KVDEV_PROBE_BAD_PAYLOAD 4         /* not the bytes that header or pattern call for */

/* Why a job ended by itself. */
#define KVDEV_PROBE_END_COMPLETE 0
#define KVDEV_PROBE_END_STOPPED 1
#define KVDEV_PROBE_END_ERROR 2
#define KVDEV_PROBE_END_RATE 3            /* below rate_min */
#define KVDEV_PROBE_END_LATENCY 4         /* an I/O over max_latency, or no depth within latency_target */

#define KVDEV_PROBE_CONTINUE_READ 1
#define KVDEV_PROBE_CONTINUE_WRITE 2
#define KVDEV_PROBE_CONTINUE_VERIFY 4

struct kvdev_probe_member {
    uint64_t memory_addr;          /* of a device in memory; 0 for a device of the queue */
    uint64_t size_bytes;
    uint32_t device_index;
    uint32_t max_transfer_bytes;
};

struct kvdev_probe_blocks {
    uint64_t low;
    uint64_t high;
    uint64_t align;                /* of random offsets */
    uint32_t split_count;
    uint32_t percent_random;
    uint64_t split_size[64];
    uint32_t split_percent[64];
};

struct kvdev_probe_params {
    uint64_t start;                /* the region that offsets lie in */
    uint64_t size;
    uint64_t io_size;              /* bytes to move in all; 0 without limit (is_time_based) */
    uint64_t number_ios;           /* 0 without limit */
    uint64_t loops;
    uint64_t seed;
    uint64_t generation;           /* of this run: tells its blocks from older ones */
    uint64_t sequence_count;       /* random: I/Os per offset */
    int64_t sequence_add;          /* sequential: bytes to skip after each I/O */
    uint64_t buffer_addr;
    uint64_t buffer_stride;
    uint64_t start_ns;             /* when the first I/O may go out */
    uint64_t runtime_ns;
    uint64_t ramp_ns;
    uint64_t rate[3];              /* bytes per second; 0 without limit */
    uint64_t rate_iops[3];
    uint64_t rate_min[3];
    uint64_t rate_iops_min[3];
    uint64_t rate_cycle_ns;
    uint64_t thinktime_ns;
    uint64_t thinktime_spin_ns;
    uint64_t thinktime_blocks;
    uint64_t max_latency_ns[3];
    uint64_t latency_target_ns;
    uint64_t latency_window_ns;
    uint64_t sample_bw_ns;         /* windows of the bandwidth and IOPS samples */
    uint64_t sample_iops_ns;
    uint64_t sync_every;           /* writes between flushes; 0 none */
    double latency_percentile;
    double distribution_value;
    double distribution_center;    /* -1: none */
    uint32_t block_size_bytes;
    uint32_t strip_size_bytes;     /* with several members */
    uint32_t member_count;
    uint32_t depth;
    uint32_t batch_submit;
    uint32_t batch_complete_min;
    uint32_t batch_complete_max;
    uint32_t depth_low;
    uint32_t read_percent;
    uint32_t verify_interval;
    uint32_t pattern_size;
    uint32_t log_capacity;
    uint8_t has[3];                /* reads, writes, trims */
    uint8_t is_random;
    uint8_t has_map;
    uint8_t is_identical;
    uint8_t distribution;          /* KVDEV_PROBE_EVENLY... */
    uint8_t is_time_based;
    uint8_t verify;                /* KVDEV_PROBE_VERIFY_* */
    uint8_t does_verify;           /* after the writes */
    uint8_t is_verify_only;        /* instead of them */
    uint8_t is_verify_fatal;
    uint8_t continues_on;          /* KVDEV_PROBE_CONTINUE_* */
    uint8_t is_rate_poisson;
    uint8_t is_thinktime_issue;
    uint8_t is_thinktime_forgiven; /* what was missed while thinking is not made up for */
    uint8_t is_latency_run;
    uint8_t end_sync;
    uint8_t has_slat;
    uint8_t has_clat;
    uint8_t has_lat;
    uint8_t is_pattern_filled;     /* pattern is the payload of unverified writes */
    uint8_t pattern[512];
    struct kvdev_probe_blocks blocks[3];
};

struct kvdev_probe_stat {          /* mean and sum of squared deviations, as Welford updates them */
    uint64_t count;
    uint64_t min;
    uint64_t max;
    double mean;
    double square;
};

struct kvdev_probe_lat {
    struct kvdev_probe_stat stat;
    uint64_t buckets[1856];
};

struct kvdev_probe_result {
    struct kvdev_probe_lat slat[3];
    struct kvdev_probe_lat clat[3];
    struct kvdev_probe_lat lat[3];
    struct kvdev_probe_lat sync;
    struct kvdev_probe_stat bw[3];     /* KiB per second of each window */
    struct kvdev_probe_stat iops[3];
    uint64_t bytes[3];
    uint64_t ios[3];
    uint64_t short_ios[3];
    uint64_t drop_ios[3];
    uint64_t runtime_ns[3];
    uint64_t depth_map[7];             /* 1, 2, 4, 8, 16, 32, 64 and over */
    uint64_t submit_map[7];            /* 0, 4, 8, 16, 32, 64, over */
    uint64_t complete_map[7];
    uint64_t submit_count;
    uint64_t complete_count;
    uint64_t clat_ns[10];              /* up to 2, 4, 10, 20, 50, 100, 250, 500, 750, 1000 */
    uint64_t clat_us[10];
    uint64_t clat_ms[12];              /* ... 2000, over */
    uint64_t began_ns;                 /* when its I/O began, after the ramp */
    uint64_t ended_ns;
    uint64_t error_count;
    uint64_t first_error_offset;
    uint64_t verified_bytes;
    uint64_t bad_count;                /* intervals that did not verify */
    uint64_t bad_offset;               /* of the first: the byte on the device */
    uint64_t bad_interval;             /* where its interval starts */
    int32_t first_error;               /* errno, positive */
    uint16_t first_status;
    uint8_t first_way;
    uint8_t bad_reason;                /* KVDEV_PROBE_BAD_* */
    uint8_t end_reason;                /* KVDEV_PROBE_END_* */
    uint8_t is_verifying;
    uint8_t is_running;
    uint8_t reserved;
    uint32_t in_flight;
    uint32_t latency_depth;            /* where latency_target ended */
};

struct kvdev_probe_log_entry {         /* one completed I/O */
    uint64_t time_ns;                  /* since the job's start */
    uint64_t slat_ns;
    uint64_t clat_ns;
    uint64_t lat_ns;
    uint64_t offset;
    uint32_t byte_count;
    uint32_t way;
};

struct kvdev_probe;

size_t kvdev_probe_params_size(void);
size_t kvdev_probe_result_size(void);

/* params and members are copied. queue may be NULL where all members are memory. The buffers hold depth times
 * buffer_stride bytes. -EINVAL: the parameters contradict each other; -E2BIG: one I/O would be too many commands. */
int kvdev_probe_create(const struct kvdev_probe_params *params, const struct kvdev_probe_member *members,
                       struct kvdev_queue *queue, struct kvdev_probe **ret);
/* With nothing outstanding. NULL is allowed. */
void kvdev_probe_destroy(struct kvdev_probe *probe);
/* When the first I/O may go out; before the first run. */
void kvdev_probe_start_set(struct kvdev_probe *probe, uint64_t start_ns);
/* Works until the job has ended or for about slice_ns; KVDEV_PROBE_*, or -errno of a queue that refuses. */
int kvdev_probe_run(struct kvdev_probe *probe, uint64_t slice_ns);
/* It ends soon: nothing more is sent, what is outstanding completes. From any thread or signal handler. */
void kvdev_probe_stop(struct kvdev_probe *probe);
const struct kvdev_probe_result *kvdev_probe_result_read(const struct kvdev_probe *probe);
/* Moves at most max entries out of the log. */
size_t kvdev_probe_log_take(struct kvdev_probe *probe, struct kvdev_probe_log_entry *entries, size_t max);

/* The bucket of a value, and the value that a bucket stands for. */
uint32_t kvdev_probe_bucket_of(uint64_t value);
uint64_t kvdev_probe_bucket_value(uint32_t bucket);
/* Adds src to dst as if all samples had come to one. */
void kvdev_probe_lat_merge(struct kvdev_probe_lat *dst, const struct kvdev_probe_lat *src);
void kvdev_probe_stat_merge(struct kvdev_probe_stat *dst, const struct kvdev_probe_stat *src);
void kvdev_probe_lat_add(struct kvdev_probe_lat *lat, uint64_t value);
/* The next count offsets and lengths that a job would use: for tests; moves the job on. Returns how many there were. */
size_t kvdev_probe_preview(struct kvdev_probe *probe, size_t count, uint64_t *offsets, uint64_t *lengths,
                           uint8_t *ways);
/* cdef end */

_Static_assert(KVDEV_PROBE_BUCKET_COUNT == 29 << KVDEV_PROBE_GROUP_BITS, "29 groups of 64 buckets");

#endif

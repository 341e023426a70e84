#include "probe_int.h"

#include <string.h>

/* The loop of a job, phase after phase. */

static void nap(uint64_t now, uint64_t until_ns)
{
    uint64_t left = until_ns > now ? until_ns - now : 0;
    if (left > POLL_SLICE_NS)
        left = POLL_SLICE_NS;
    struct timespec ts = { .tv_sec = 0, .tv_nsec = (long)left };
    clock_nanosleep(CLOCK_MONOTONIC, 0, &ts, NULL);
}

static int think_is_due(struct kvdev_probe *probe)
{
    const struct kvdev_probe_params *p = &probe->params;
    return p->thinktime_ns && probe->think_count >= p->thinktime_blocks;
}

/* With nothing in flight: spins its part, then sets until when the job sleeps. */
static void think(struct kvdev_probe *probe, uint64_t now)
{
    const struct kvdev_probe_params *p = &probe->params;
    uint64_t spin_until = now + p->thinktime_spin_ns;
    while (now < spin_until && !probe_is_stopped(probe))
        now = probe_now_ns();
    uint64_t rest = p->thinktime_ns > p->thinktime_spin_ns ? p->thinktime_ns - p->thinktime_spin_ns : 0;
    probe->think_until_ns = now + rest;
    probe->think_count = 0;
    if (!p->is_thinktime_forgiven)
        return;
    for (int way = 0; way < 3; way++) {
        probe->rate_bytes[way] += (uint64_t)((double)p->rate[way] * (double)p->thinktime_ns / NS_PER_S);
        probe->rate_ios[way] += (uint64_t)((double)p->rate_iops[way] * (double)p->thinktime_ns / NS_PER_S);
    }
}

/* Generates and submits until the depth is reached, something has to be waited for (*until_ns), or there is no more:
 * then *is_over. */
static int fill(struct kvdev_probe *probe, uint64_t now, uint64_t *until_ns, int *is_over)
{
    const struct kvdev_probe_params *p = &probe->params;
    int is_verify = probe->phase == PHASE_VERIFY;
    *until_ns = 0;
    *is_over = 0;
    while (probe->in_flight + probe->batch_count < probe->depth_limit) {
        if (!is_verify && (think_is_due(probe) || now < probe->think_until_ns)) {
            if (think_is_due(probe) && !probe->in_flight && !probe->batch_count)
                think(probe, now);
            *until_ns = probe->think_until_ns;
            break;
        }
        if (!probe->is_held) {
            if (!probe_generate(probe, &probe->held)) {
                *is_over = 1;
                break;
            }
            if (is_verify && probe->held.way != KVDEV_PROBE_WRITE)
                continue;
            probe->is_held = 1;
        }
        if (!is_verify) {
            if (p->sync_every && probe->writes_since_sync >= p->sync_every) {
                probe->writes_since_sync = 0;
                probe_prepare(probe, KIND_SYNC, NULL);
                goto batched;
            }
            probe_rate_turn(probe, now);
            uint64_t due = probe_rate_due(probe, probe->held.way);
            if (due > now) {
                *until_ns = due;
                break;
            }
            probe_rate_spend(probe, &probe->held, now);
            probe->writes_since_sync += probe->held.way == KVDEV_PROBE_WRITE;
            probe->think_count += p->is_thinktime_issue;
        }
        probe->is_held = 0;
        probe_prepare(probe, is_verify ? KIND_VERIFY : KIND_IO, &probe->held);
batched:
        if (probe->batch_count >= p->batch_submit) {
            int error = probe_batch_submit(probe);
            if (error)
                return error;
            if (!p->batch_complete_min)
                probe_reap(probe, 0, p->depth, 0);
            now = probe_now_ns();
        }
        if (probe_is_stopped(probe))
            break;
    }
    return probe_batch_submit(probe);
}

static void phase_begin(struct kvdev_probe *probe, enum probe_phase phase, uint64_t now)
{
    probe->phase = phase;
    probe->phase_ns = now;
    if (phase == PHASE_VERIFY) {
        /* A job that only verifies goes through all of its sequence. */
        probe->verify_ios = probe->params.is_verify_only ? UINT64_MAX : probe->progress.ios - (uint64_t)probe->is_held;
        probe->is_held = 0;
        memset(&probe->progress, 0, sizeof probe->progress);
        probe_sequence_restart(&probe->sequence);
        probe->result.is_verifying = 1;
    }
}

static void run_ended(struct kvdev_probe *probe, uint64_t now)
{
    for (int way = 0; way < 3; way++)
        if (probe->params.has[way] && probe->phase != PHASE_VERIFY)
            probe->result.runtime_ns[way] = now - probe->result.began_ns;
    if (probe->phase == PHASE_VERIFY)
        probe->result.runtime_ns[KVDEV_PROBE_READ] += now - probe->phase_ns;
}

/* Nothing is in flight, and nothing more will be sent in this phase. */
static void phase_end(struct kvdev_probe *probe, uint64_t now)
{
    const struct kvdev_probe_params *p = &probe->params;
    int has_failed = probe->result.end_reason >= KVDEV_PROBE_END_ERROR;
    if (probe->phase != PHASE_SYNC)
        run_ended(probe, now);
    if (probe->phase == PHASE_RUN && p->end_sync && p->has[KVDEV_PROBE_WRITE] && !has_failed) {
        phase_begin(probe, PHASE_SYNC, now);
        probe_prepare(probe, KIND_SYNC, NULL);
        return;
    }
    if (probe->phase != PHASE_VERIFY && p->verify && p->does_verify && p->has[KVDEV_PROBE_WRITE] && !has_failed &&
        !probe_is_stopped(probe)) {
        phase_begin(probe, PHASE_VERIFY, now);
        return;
    }
    if (!probe->result.end_reason && probe_is_stopped(probe))
        probe->result.end_reason = KVDEV_PROBE_END_STOPPED;
    probe->result.ended_ns = now;
    probe->result.is_running = 0;
    probe->phase = PHASE_ENDED;
}

/* One turn: fill, then wait for something. */
static int turn(struct kvdev_probe *probe, uint64_t now)
{
    const struct kvdev_probe_params *p = &probe->params;
    uint64_t until = 0;
    int is_over = 0, error = 0;
    if (!probe->has_ramped && now >= p->start_ns + p->ramp_ns) {
        probe->has_ramped = 1;
        if (p->ramp_ns)
            probe_measure_from(probe, now);
    }
    if (probe->phase == PHASE_RUN && p->runtime_ns && now >= probe->result.began_ns + p->runtime_ns &&
        probe->has_ramped)
        is_over = 1;
    if (probe->phase == PHASE_RUN && probe->has_ramped) {
        probe_samples_take(probe, now);
        probe_rates_check(probe, now);
        probe_target_turn(probe, now);
    }
    if (probe->phase == PHASE_SYNC)
        is_over = 1;
    if (probe_is_stopped(probe) || is_over)
        error = probe_batch_submit(probe);
    else
        error = fill(probe, now, &until, &is_over);
    if (error)
        return error;
    if (!probe->in_flight) {
        if (is_over || probe_is_stopped(probe))
            phase_end(probe, probe_now_ns());
        else if (until)
            nap(now, until);
        return 0;
    }
    uint32_t want = 1, most = p->batch_complete_max ? p->batch_complete_max : 1;
    if (probe->in_flight >= probe->depth_limit && p->batch_complete_min)
        want = p->batch_complete_min < probe->in_flight ? p->batch_complete_min : probe->in_flight;
    if (most < want)
        most = want;
    uint64_t timeout = POLL_SLICE_NS;
    if (until) {
        now = probe_now_ns();
        timeout = until > now ? until - now : 0;
        timeout = timeout < POLL_SLICE_NS ? timeout : POLL_SLICE_NS;
    }
    int is_full = probe->in_flight >= probe->depth_limit;
    do {
        if (!probe_reap(probe, want, most, timeout))
            break;
        if (probe->queue && kvdev_queue_attention(probe->queue))
            break;
    } while (is_full && p->depth_low < p->depth && probe->in_flight > p->depth_low);
    return 0;
}

static int wait_start(struct kvdev_probe *probe, uint64_t now)
{
    const struct kvdev_probe_params *p = &probe->params;
    if (probe_is_stopped(probe)) {
        probe->result.began_ns = now;
        phase_end(probe, now);
        return 1;
    }
    if (now < p->start_ns) {
        nap(now, p->start_ns);
        return 0;
    }
    probe->result.is_running = 1;
    probe->result.began_ns = now;
    probe->has_ramped = !p->ramp_ns;
    probe->params.start_ns = now;
    probe_windows_start(probe, now);
    phase_begin(probe, p->is_verify_only ? PHASE_VERIFY : PHASE_RUN, now);
    return 1;
}

int kvdev_probe_run(struct kvdev_probe *probe, uint64_t slice_ns)
{
    uint64_t now = probe_now_ns();
    uint64_t until = now + slice_ns;
    while (probe->phase != PHASE_ENDED) {
        if (now >= until)
            return KVDEV_PROBE_LOOK;
        if (probe->log && probe->log_count + probe->params.depth + 1 > probe->params.log_capacity)
            return KVDEV_PROBE_LOG_FULL;
        if (probe->phase == PHASE_WAIT) {
            wait_start(probe, now);
        } else {
            int error = turn(probe, now);
            if (error)
                return error;
            if (probe->queue && kvdev_queue_attention(probe->queue))
                return KVDEV_PROBE_LOOK;
        }
        now = probe_now_ns();
    }
    return KVDEV_PROBE_DONE;
}

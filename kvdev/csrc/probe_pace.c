#include "probe_int.h"

#include <math.h>
#include <string.h>

/* Rates, samples of windows, and the search for the depth of latency_target. */

static int has_mix(const struct kvdev_probe_params *p)
{
    return p->has[KVDEV_PROBE_READ] && p->has[KVDEV_PROBE_WRITE];
}

/* When the I/O may go out. */
uint64_t probe_rate_due(const struct kvdev_probe *probe, uint32_t way)
{
    const struct kvdev_probe_params *p = &probe->params;
    if (!p->rate[way] && !p->rate_iops[way])
        return 0;
    if (p->is_rate_poisson)
        return probe->rate_due_ns[way];
    unsigned __int128 share = p->rate[way] ? (unsigned __int128)probe->rate_bytes[way] * NS_PER_S / p->rate[way]
                                           : (unsigned __int128)probe->rate_ios[way] * NS_PER_S / p->rate_iops[way];
    return probe->result.began_ns + (uint64_t)share;
}

void probe_rate_spend(struct kvdev_probe *probe, const struct probe_io *io, uint64_t now)
{
    const struct kvdev_probe_params *p = &probe->params;
    uint32_t way = io->way;
    probe->rate_bytes[way] += io->length;
    probe->rate_ios[way]++;
    if (!p->is_rate_poisson || !(p->rate[way] || p->rate_iops[way]))
        return;
    double mean = p->rate[way] ? (double)io->length * NS_PER_S / (double)p->rate[way]
                               : (double)NS_PER_S / (double)p->rate_iops[way];
    uint64_t from = probe->rate_due_ns[way] ? probe->rate_due_ns[way] : now;
    probe->rate_due_ns[way] = from + (uint64_t)(-log(1.0 - probe_random_unit(&probe->rate_random)) * mean);
}

/* Of a mix with rates, the direction that may go next: both reach their rate, whatever the mix says. */
void probe_rate_turn(struct kvdev_probe *probe, uint64_t now)
{
    const struct kvdev_probe_params *p = &probe->params;
    uint32_t way = probe->held.way, other = way == KVDEV_PROBE_READ ? KVDEV_PROBE_WRITE : KVDEV_PROBE_READ;
    if (p->verify || !has_mix(p) || probe_rate_due(probe, way) <= now || probe_rate_due(probe, other) >= probe_rate_due(probe, way))
        return;
    struct probe_io io;
    if (probe->is_put_off[way])
        return;
    if (!probe_put_off_take(probe, other, &io) && !probe_generate_way(probe, other, &io))
        return;
    probe->put_off[way] = probe->held;
    probe->is_put_off[way] = 1;
    probe->held = io;
}

void probe_samples_take(struct kvdev_probe *probe, uint64_t now)
{
    const struct kvdev_probe_params *p = &probe->params;
    struct kvdev_probe_result *r = &probe->result;
    if (now >= probe->window_bw_ns + p->sample_bw_ns) {
        uint64_t span = now - probe->window_bw_ns;
        for (int way = 0; way < 3; way++) {
            uint64_t bytes = r->bytes[way] - probe->window_bw_bytes[way];
            if (bytes)
                probe_stat_add(&r->bw[way], (uint64_t)((double)bytes * NS_PER_S / (double)span / 1024.0));
            probe->window_bw_bytes[way] = r->bytes[way];
        }
        probe->window_bw_ns = now;
    }
    if (now >= probe->window_iops_ns + p->sample_iops_ns) {
        uint64_t span = now - probe->window_iops_ns;
        for (int way = 0; way < 3; way++) {
            uint64_t ios = r->ios[way] - probe->window_iops_ios[way];
            if (ios)
                probe_stat_add(&r->iops[way], (uint64_t)((double)ios * NS_PER_S / (double)span));
            probe->window_iops_ios[way] = r->ios[way];
        }
        probe->window_iops_ns = now;
    }
}

void probe_rates_check(struct kvdev_probe *probe, uint64_t now)
{
    const struct kvdev_probe_params *p = &probe->params;
    struct kvdev_probe_result *r = &probe->result;
    if (!p->rate_cycle_ns || now < probe->window_rate_ns + p->rate_cycle_ns)
        return;
    double span = (double)(now - probe->window_rate_ns) / NS_PER_S;
    for (int way = 0; way < 3; way++) {
        double bytes = (double)(r->bytes[way] - probe->window_rate_bytes[way]);
        double ios = (double)(r->ios[way] - probe->window_rate_ios[way]);
        if ((p->rate_min[way] && bytes / span < (double)p->rate_min[way]) ||
            (p->rate_iops_min[way] && ios / span < (double)p->rate_iops_min[way]))
            probe_end_with(probe, KVDEV_PROBE_END_RATE);
        probe->window_rate_bytes[way] = r->bytes[way];
        probe->window_rate_ios[way] = r->ios[way];
    }
    probe->window_rate_ns = now;
}

void probe_windows_start(struct kvdev_probe *probe, uint64_t now)
{
    probe->window_bw_ns = probe->window_iops_ns = probe->window_rate_ns = probe->target_ns = now;
    memset(probe->window_bw_bytes, 0, sizeof probe->window_bw_bytes);
    memset(probe->window_iops_ios, 0, sizeof probe->window_iops_ios);
    memset(probe->window_rate_bytes, 0, sizeof probe->window_rate_bytes);
    memset(probe->window_rate_ios, 0, sizeof probe->window_rate_ios);
    memset(probe->rate_bytes, 0, sizeof probe->rate_bytes);
    memset(probe->rate_ios, 0, sizeof probe->rate_ios);
    memset(probe->rate_due_ns, 0, sizeof probe->rate_due_ns);
}

/* What has been counted so far is forgotten: the measurement begins now. */
void probe_measure_from(struct kvdev_probe *probe, uint64_t now)
{
    struct kvdev_probe_result *r = &probe->result;
    uint8_t end_reason = r->end_reason, is_running = r->is_running;
    uint32_t depth = r->latency_depth;
    struct kvdev_probe_result errors = *r;
    memset(r, 0, sizeof *r);
    r->end_reason = end_reason;
    r->is_running = is_running;
    r->latency_depth = depth;
    r->began_ns = now;
    r->in_flight = probe->in_flight;
    r->error_count = errors.error_count;
    r->first_error = errors.first_error;
    r->first_status = errors.first_status;
    r->first_error_offset = errors.first_error_offset;
    r->first_way = errors.first_way;
    probe_windows_start(probe, now);
}

/* The end of a window of latency_target: the next depth to try, by halves. */
void probe_target_turn(struct kvdev_probe *probe, uint64_t now)
{
    const struct kvdev_probe_params *p = &probe->params;
    if (!p->latency_target_ns || now < probe->target_ns + p->latency_window_ns || !probe->target_ios)
        return;
    double good = 100.0 * (double)(probe->target_ios - probe->target_late) / (double)probe->target_ios;
    int is_good = good >= p->latency_percentile;
    uint32_t depth = probe->depth_limit;
    probe->target_ns = now;
    probe->target_ios = probe->target_late = 0;
    if (probe->is_target_final && !p->is_latency_run) {
        probe_end_with(probe, KVDEV_PROBE_END_COMPLETE);
        return;
    }
    if (is_good) {
        probe->target_low = depth;
        probe->result.latency_depth = depth;
    } else {
        probe->target_high = depth;
        if (depth == 1) {
            probe_end_with(probe, KVDEV_PROBE_END_LATENCY);
            return;
        }
        if (probe->target_low >= depth)
            probe->target_low = depth / 2;
    }
    uint32_t next = probe->target_high > p->depth && is_good ? depth * 2 : (probe->target_low + probe->target_high) / 2;
    if (next > p->depth)
        next = p->depth;
    if (next < 1)
        next = 1;
    if (probe->target_low && next == probe->target_low) {
        probe->is_target_final = 1;
        probe->depth_limit = probe->target_low;
        probe->result.latency_depth = probe->target_low;
        probe_measure_from(probe, now);
        return;
    }
    probe->depth_limit = next;
}


/* The fuzzer's driver: seeded inputs under a compiler with sanitizers alone, or files; with -DKVDEV_FUZZ_LIBFUZZER the
 * same for libFuzzer. An input that fails is told by its seed, or by its file. */
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <sanitizer/asan_interface.h>

#include "fuzz.h"

#define INPUT_MAX 3072u
#define HANG_S 20 /* of the processor's time; 256 inputs take a quarter of a second */

struct fuzz_report fuzz_report;
uint8_t fuzz_pattern[FUZZ_PATTERN_BYTES];

const char *__asan_default_options(void);

/* Small enough to stay in the processor's cache: what was freed is watched for about a thousand inputs. */
const char *__asan_default_options(void)
{
    return "quarantine_size_mb=16:malloc_context_size=8:abort_on_error=0:detect_leaks=1";
}

static char input_name[256] = "an input of libFuzzer";

static void say_input(void)
{
    fprintf(stderr, "fuzz: it happened with %s\n", input_name);
}

void fuzz_fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fprintf(stderr, "fuzz: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    say_input();
    abort();
}

void fuzz_setup(void)
{
    uint64_t state = 1;
    for (size_t i = 0; i + 8 <= sizeof fuzz_pattern; i += 8) {
        uint64_t word = fuzz_random(&state);
        memcpy(fuzz_pattern + i, &word, sizeof word);
    }
}

void fuzz_one(const uint8_t *bytes, size_t len)
{
    struct source source = { bytes, bytes + len };
    fuzz_report.inputs++;
    if (take(&source) & 1)
        fuzz_host(&source);
    else
        fuzz_target(&source);
}

#ifdef KVDEV_FUZZ_LIBFUZZER

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len);

static void say_report(void)
{
    fprintf(stderr, "fuzz: %llu PDUs, %llu of them mutated, %llu answers checked\n",
            (unsigned long long)fuzz_report.pdus, (unsigned long long)fuzz_report.mutated,
            (unsigned long long)fuzz_report.violations);
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc;
    (void)argv;
    fuzz_setup();
    atexit(say_report);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t len)
{
    fuzz_one(bytes, len);
    return 0;
}

#else

/* The input of one seed: decisions at random. */
static size_t input_make(uint64_t seed, uint8_t *bytes)
{
    uint64_t state = seed;
    size_t len = 64 + fuzz_random(&state) % (INPUT_MAX - 64);
    for (size_t i = 0; i < len; i += 8) {
        uint64_t word = fuzz_random(&state);
        memcpy(bytes + i, &word, sizeof word);
    }
    return len;
}

static void run_seed(uint64_t seed)
{
    uint8_t made[INPUT_MAX + 8];
    size_t len = input_make(seed, made);
    snprintf(input_name, sizeof input_name, "--seed %llu --replay", (unsigned long long)seed);
    uint8_t *bytes = malloc(len); /* its end is watched */
    memcpy(bytes, made, len);
    fuzz_one(bytes, len);
    free(bytes);
}

static void run_file(const char *path)
{
    static uint8_t bytes[1u << 20];
    FILE *file = fopen(path, "rb");
    if (!file) {
        fprintf(stderr, "fuzz: %s cannot be read\n", path);
        exit(2);
    }
    size_t len = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    snprintf(input_name, sizeof input_name, "file %.200s", path);
    fuzz_one(bytes, len);
}

static void on_hang(int signal_number)
{
    static const char text[] = "fuzz: hang\n";
    (void)signal_number;
    ssize_t n = write(2, text, sizeof text - 1);
    (void)n;
    say_input();
    abort();
}

static void hang_watch(int seconds)
{
    struct itimerval timer = { .it_value = { .tv_sec = seconds } };
    setitimer(ITIMER_PROF, &timer, NULL);
}

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

struct options {
    uint64_t seed;
    uint64_t mutated; /* PDUs to mutate, 0: no limit */
    double seconds;   /* 0: no limit */
    uint32_t jobs;
    int is_replay;
};

static void report_say(const char *who, double seconds)
{
    const struct fuzz_report *r = &fuzz_report;
    printf("fuzz: %s: %llu inputs, %llu connections, %llu PDUs, %llu mutated, %llu named wrongs checked, "
           "%llu Term PDUs checked, %llu commands, %llu with success, %.1f s\n",
           who, (unsigned long long)r->inputs, (unsigned long long)r->connections, (unsigned long long)r->pdus,
           (unsigned long long)r->mutated, (unsigned long long)r->violations, (unsigned long long)r->terms,
           (unsigned long long)r->commands, (unsigned long long)r->completed, seconds);
}

static int job(const struct options *options, uint32_t index)
{
    double start = seconds_now();
    uint64_t share = (options->mutated + options->jobs - 1) / options->jobs;
    char who[64];
    for (uint64_t i = 0; !options->mutated || fuzz_report.mutated < share; i++) {
        if (i % 256 == 0) {
            hang_watch(HANG_S);
            if (options->seconds > 0 && seconds_now() - start >= options->seconds)
                break;
        }
        run_seed(options->seed + index + i * options->jobs);
    }
    hang_watch(0);
    snprintf(who, sizeof who, "job %u of %u from seed %llu", index + 1, options->jobs,
             (unsigned long long)options->seed);
    report_say(who, seconds_now() - start);
    return 0;
}

/* Each job in a process of its own; the worst exit status. */
static int jobs_run(const struct options *options)
{
    int worst = 0;
    fflush(stdout);
    for (uint32_t i = 0; i < options->jobs; i++) {
        pid_t pid = fork();
        if (pid < 0)
            return 1;
        if (pid == 0)
            exit(job(options, i)); /* the leak check runs at exit */
    }
    for (uint32_t i = 0; i < options->jobs; i++) {
        int status = 0;
        if (wait(&status) < 0 || !WIFEXITED(status) || WEXITSTATUS(status))
            worst = 1;
    }
    return worst;
}

static int usage(void)
{
    fprintf(stderr, "usage: pdu_fuzz [--seed N] [--mutated N] [--seconds S] [--jobs N] [--replay] [FILE...]\n");
    return 2;
}

int main(int argc, char **argv)
{
    struct options options = { .seed = 1, .jobs = 1 };
    int at = 1;
    for (; at < argc && !strncmp(argv[at], "--", 2); at++) {
        if (!strcmp(argv[at], "--replay")) {
            options.is_replay = 1;
            continue;
        }
        if (at + 1 == argc)
            return usage();
        const char *name = argv[at], *value = argv[++at];
        if (!strcmp(name, "--seed"))
            options.seed = strtoull(value, NULL, 0);
        else if (!strcmp(name, "--mutated"))
            options.mutated = strtoull(value, NULL, 0);
        else if (!strcmp(name, "--seconds"))
            options.seconds = strtod(value, NULL);
        else if (!strcmp(name, "--jobs"))
            options.jobs = (uint32_t)strtoul(value, NULL, 0);
        else
            return usage();
    }
    fuzz_setup();
    signal(SIGPROF, on_hang);
    __sanitizer_set_death_callback(say_input);
    if (at < argc || options.is_replay) {
        if (options.is_replay)
            run_seed(options.seed);
        for (; at < argc; at++)
            run_file(argv[at]);
        report_say("replay", 0);
        return 0;
    }
    if ((!options.mutated && options.seconds <= 0) || !options.jobs || options.jobs > 64)
        return usage();
    if (options.jobs > 1)
        return jobs_run(&options);
    return job(&options, 0);
}

#endif

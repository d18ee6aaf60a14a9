// The team of threads that runs the kernels; see parallel_for in native.h.
//
// Why not OpenMP: its join waits for every thread, so one thread that a busy neighbour keeps off the CPU stops the
// step, and its waiting is tuned for the whole process by an environment variable. Here a helper that comes late finds
// the job closed and goes back to wait; the caller never waits for a thread that has not begun. Helpers spin for
// SPIN_NS after a job (the next one of a step comes within microseconds), then they sleep.
#include "native.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace {

constexpr uint32_t CLOSED = 1u << 31;
constexpr long SPIN_NS = 50000;

struct Team {
    alignas(64) uint32_t job;            // number of the newest job; helpers sleep on it
    alignas(64) uint32_t gate = CLOSED;  // helpers inside the job, or CLOSED
    alignas(64) uint32_t busy;
    uint32_t sleeping;
    long helpers;  // threads that exist
    long wanted;   // helpers that the open job may take
    void (*body)(void *, long);
    void *data;
} team;
int (*wanted_threads)() = nullptr;

INLINE void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

INLINE long now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000L + t.tv_nsec;
}

void wait_for_job(uint32_t seen) {
    long until = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 16; i++) {
            if (__atomic_load_n(&team.job, __ATOMIC_ACQUIRE) != seen) return;
            relax();
        }
        sched_yield();  // a neighbour that wants this CPU gets it
    } while (now_ns() < until);
    __atomic_add_fetch(&team.sleeping, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&team.job, __ATOMIC_SEQ_CST) == seen)
        syscall(SYS_futex, &team.job, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    __atomic_sub_fetch(&team.sleeping, 1, __ATOMIC_SEQ_CST);
}

void *help(void *index) {
    uint32_t seen = 0;
    for (;;) {
        wait_for_job(seen);
        seen = __atomic_load_n(&team.job, __ATOMIC_ACQUIRE);
        uint32_t inside = __atomic_load_n(&team.gate, __ATOMIC_RELAXED);
        while (!(inside & CLOSED))
            if (__atomic_compare_exchange_n(&team.gate, &inside, inside + 1, false, __ATOMIC_ACQUIRE,
                                            __ATOMIC_RELAXED)) {
                if ((long)index < team.wanted) team.body(team.data, (long)index + 1);
                __atomic_sub_fetch(&team.gate, 1, __ATOMIC_RELEASE);
                break;
            }
    }
    return nullptr;
}

// A forked child has none of the threads; it starts its own.
void forget_team() {
    team.gate = CLOSED;
    team.busy = team.sleeping = 0;
    team.helpers = 0;
}

}  // namespace

long team_size() { return wanted_threads ? wanted_threads() : 1; }

void team_run(long threads, void (*body)(void *, long), void *data) {
    if (__atomic_exchange_n(&team.busy, 1, __ATOMIC_ACQUIRE)) return body(data, 0);  // another caller has the helpers
    while (team.helpers < threads - 1) {
        pthread_t thread;
        if (pthread_create(&thread, nullptr, help, (void *)team.helpers)) break;
        pthread_detach(thread);
        team.helpers++;
    }
    team.body = body;
    team.data = data;
    team.wanted = threads - 1;
    __atomic_store_n(&team.gate, 0, __ATOMIC_RELEASE);
    __atomic_add_fetch(&team.job, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&team.sleeping, __ATOMIC_SEQ_CST))
        syscall(SYS_futex, &team.job, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
    body(data, 0);
    __atomic_or_fetch(&team.gate, CLOSED, __ATOMIC_ACQUIRE);
    for (int spins = 0; __atomic_load_n(&team.gate, __ATOMIC_ACQUIRE) != CLOSED; spins++)
        if (spins < 4096)
            relax();
        else
            sched_yield();
    __atomic_store_n(&team.busy, 0, __ATOMIC_RELEASE);
}

OSTINATO_API void set_team(int (*threads)()) {
    if (!wanted_threads) pthread_atfork(nullptr, nullptr, forget_team);
    wanted_threads = threads;
}

// Make the threads of the team now, so that the caller can bind them; they sleep until there is work.
OSTINATO_API void start_team() {
    team_run(
        team_size(), [](void *, long) {}, nullptr);
}

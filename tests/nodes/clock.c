/* LD_PRELOAD: the clock of a node that is SHIFT seconds ahead; intervals are right. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *at) {
    int result = syscall(SYS_clock_gettime, id, at);
    if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += SHIFT;
    return result;
}

int gettimeofday(struct timeval *at, void *zone) {
    int result = syscall(SYS_gettimeofday, at, zone);
    if (result == 0 && at) at->tv_sec += SHIFT;
    return result;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}

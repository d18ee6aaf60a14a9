// The hand-over of torch's OpenMP runtime; see parallel_for in native.h.
#include "native.h"

ParallelFn team_parallel = nullptr;
int (*team_size)() = nullptr;

OSTINATO_API void set_team(ParallelFn parallel, int (*size)()) {
    team_parallel = parallel;
    team_size = size;
}

/* How long the parts of a call take, in nanoseconds: guards, plan without its host program, host program.
 *
 * A few of the calls of a frame are timed where they run, so that what is measured is what happens; no
 * argument is kept and nothing runs twice. The first hits are, then one in 1024, and for `measure` all of
 * the next ones: deciding that costs a comparison of a counter that the call counts anyway. */
#ifndef TRIDENT_TIMING_H
#define TRIDENT_TIMING_H

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>

namespace trident {

constexpr uint64_t kFirstSamples = 8;
constexpr uint64_t kSampleMask = 1023;

inline int64_t now_ns() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

/* What two readings in a row differ by. */
inline int64_t clock_cost_ns() {
  static const int64_t cost = [] {
    int64_t least = 1000;
    for (int i = 0; i < 100; i++) {
      const int64_t start = now_ns();
      least = std::min(least, now_ns() - start);
    }
    return least;
  }();
  return cost;
}

/* Since `start`, without the reading of the clock. */
inline int64_t elapsed_ns(int64_t start) {
  const int64_t elapsed = now_ns() - start;
  return std::max(elapsed - clock_cost_ns(), int64_t{0});
}

/* The latest sampled calls of one specialization. */
struct Timings {
  struct Sample {
    int64_t guards_ns, plan_ns, program_ns; /* -1: there is none */
  };
  static constexpr size_t kKept = 31;
  std::array<Sample, kKept> samples;
  uint64_t n = 0;      /* ever made */
  int64_t last_ns = 0; /* the clock at the last one */

  void add(int64_t guards_ns, int64_t plan_ns, int64_t program_ns) {
    samples[n++ % kKept] = {guards_ns, plan_ns, program_ns};
    last_ns = now_ns();
  }
};

} // namespace trident
#endif

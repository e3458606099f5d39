// A parallel loop over XLA's own thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace paged {

// Calls body(0 .. count - 1), each once, on the calling thread and on up to max_threads - 1 others. The caller takes
// part and waits only for work that somebody began: a pool whose threads are all busy, or blocked in calls like this
// one, cannot stop it. `body` must not throw.
inline void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, int64_t max_threads,
                         const std::function<void(int64_t)>& body) {
  const int64_t helpers = std::min({pool.num_threads(), max_threads, count}) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < count; i++) body(i);
    return;
  }
  struct Shared {
    const std::function<void(int64_t)>* body;
    int64_t count;
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable all_done;

    void take_part() {
      int64_t mine = 0;
      // A late helper finds nothing left and never touches `body`, which may be gone by then.
      for (int64_t i; (i = next.fetch_add(1)) < count; mine++) (*body)(i);
      if (mine && done.fetch_add(mine) + mine == count) {
        std::lock_guard<std::mutex> lock(mutex);
        all_done.notify_all();
      }
    }
  };
  auto shared = std::make_shared<Shared>();
  shared->body = &body;
  shared->count = count;
  for (int64_t i = 0; i < helpers; i++) pool.Schedule([shared] { shared->take_part(); });
  shared->take_part();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_done.wait(lock, [&] { return shared->done.load() == shared->count; });
}

}  // namespace paged

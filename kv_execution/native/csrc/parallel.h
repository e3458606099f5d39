// A parallel loop over XLA's own thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "xla/ffi/api/ffi.h"

namespace paged {

// Waking a thread takes the system longer than many of our loops last. So whoever waits looks again for about this
// long before it sleeps: a caller for the end of what others began, a helper for the next loop.
constexpr std::chrono::microseconds kPatience{50};

// Whether `ready` came true within kPatience.
template <class Ready>
bool comes_true(const Ready& ready) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  do {
    for (int i = 0; i < 32; i++) {
      if (ready()) return true;
#ifdef PAGED_X86
      __builtin_ia32_pause();
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

// One loop, shared by those who take part.
struct Loop {
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

  void wait() {
    const auto finished = [this] { return done.load() == count; };
    if (comes_true(finished)) return;
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, finished);
  }
};

// A helper that waits for its next loop without sleeping. `called` is set by the one caller that took it from the
// list, once, after `loop`.
struct alignas(64) Waiting {
  std::shared_ptr<Loop> loop;
  std::atomic<bool> called{false};
};

constexpr int kMostWaiting = 64;
inline std::atomic<Waiting*> g_waiting[kMostWaiting];

// What a thread of the pool does when it is woken for a loop: that one, and those that follow closely.
inline void help(std::shared_ptr<Loop> loop) {
  for (;;) {
    loop->take_part();
    Waiting waiting;
    std::atomic<Waiting*>* place = nullptr;
    for (auto& one : g_waiting) {
      Waiting* none = nullptr;
      if (one.compare_exchange_strong(none, &waiting)) {
        place = &one;
        break;
      }
    }
    if (!place) return;
    const auto called = [&] { return waiting.called.load(); };
    if (!comes_true(called)) {
      Waiting* mine = &waiting;
      if (place->compare_exchange_strong(mine, nullptr)) return;
      while (!called()) {  // somebody took it from the list just now
      }
    }
    loop = std::move(waiting.loop);
  }
}

// Calls body(0 .. count - 1), each once, on the calling thread and on up to max_threads - 1 others. The caller takes
// part and waits only for work that somebody began: a pool whose threads are all busy, or blocked in calls like this
// one, cannot stop it. `body` must not throw.
inline void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, int64_t max_threads,
                         const std::function<void(int64_t)>& body) {
  int64_t helpers = std::min({pool.num_threads(), max_threads, count}) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < count; i++) body(i);
    return;
  }
  auto loop = std::make_shared<Loop>();
  loop->body = &body;
  loop->count = count;
  for (int i = 0; i < kMostWaiting && helpers > 0; i++)
    if (g_waiting[i].load())
      if (Waiting* waiting = g_waiting[i].exchange(nullptr)) {
        waiting->loop = loop;
        waiting->called.store(true);
        helpers--;
      }
  for (; helpers > 0; helpers--) pool.Schedule([loop] { help(loop); });
  loop->take_part();
  loop->wait();
}

}  // namespace paged

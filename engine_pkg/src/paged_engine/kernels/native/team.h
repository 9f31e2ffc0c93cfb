// The threads that run kernels together, and memory that a thread keeps between calls.
#pragma once

#include <cstdlib>

#include "simd.h"

namespace {

// Scratch memory of one thread: grows to the largest request and is reused by later calls, so that a step touches no
// fresh pages.
class Scratch {
 public:
  ~Scratch() { free(memory_); }

  // At least `bytes`, aligned to a cache line; what an earlier call left there is lost.
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      free(memory_);
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = aligned_alloc(64, size_);
      if (!memory_) abort();
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  size_t size_ = 0;
};

// Hands out aligned pieces of one scratch block: first add up the sizes, then take the pieces in the same order.
class Pieces {
 public:
  explicit Pieces(void* memory) : next_((char*)memory) {}
  template <class T>
  T* take(size_t count) {
    T* piece = (T*)next_;
    next_ += bytes<T>(count);
    return piece;
  }
  template <class T>
  static size_t bytes(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  char* next_;
};

// The threads that run kernels together, as one of them sees it. All of them call the same kernels in the same order. A kernel
// waits before it reads what other threads may have written, and does not wait at its end.
class Team {
 public:
  // f(team) on all threads, or only on the calling one: with a number in between, libgomp would end the threads by which a team
  // is smaller than the one before it, and start them anew for the next. `bytes` of memory are shared.
  template <class Function>
  static void run(int num_threads, bool alone, size_t bytes, Function f) {
    static thread_local Scratch scratch;
    Shared shared = {scratch.reserve(bytes), {}};
#pragma omp parallel num_threads(alone ? 1 : num_threads)
    {
      Team team(num_threads, shared);
      f(team);
    }
  }

  int num_threads() const { return num_threads_; }
  void* memory() const { return shared_.memory; }

  void wait() const {
#pragma omp barrier
  }

  // f(i) for every i below n, in equal parts. The same thread gets the same i whenever n is the same.
  template <class Function>
  void divide(int64_t n, Function f) const {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < n; i++) f(i);
  }

  // f(i, next) for every i below n, each by the thread that is free; `next` is what it will do after i, n for nothing.
  // Threads must wait between two such loops.
  template <class Function>
  void share(int64_t n, Function f) {
    int64_t& taken = shared_.taken[loop_++ % 2];
    const auto take = [&] { return smaller(__atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED), n); };
    // Nobody uses the other count: the last loop is over and the next one comes after a wait.
#pragma omp master
    shared_.taken[loop_ % 2] = 0;
    for (int64_t i = take(), next; i < n; i = next) {
      next = take();
      f(i, next);
    }
  }

 private:
  struct Shared {
    void* memory;
    int64_t taken[2];
  };

  Team(int num_threads, Shared& shared) : num_threads_(num_threads), shared_(shared) {}

  int num_threads_;
  Shared& shared_;
  int loop_ = 0;
};

}  // namespace

// The threads that run kernels together, and memory that a thread keeps between calls.
#pragma once

#include <omp.h>
#include <sched.h>

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
//
// A thread that waits for long gives its core away: where other processes want the cores too, the thread that is waited for may
// not be running because of it. Without this a step takes many times as long there, one time slice of theirs for each wait.
class Team {
 public:
  // f(team) on all threads, or only on the calling one: with a number in between, libgomp would end the threads by which a team
  // is smaller than the one before it, and start them anew for the next. `bytes` of memory are shared.
  template <class Function>
  static void run(int num_threads, bool alone, size_t bytes, Function f) {
    static thread_local Scratch scratch;
    Shared shared;
    shared.memory = scratch.reserve(bytes);
#pragma omp parallel num_threads(alone ? 1 : num_threads)
    {
      Team team(shared);
      f(team);
      team.wait();
    }
  }

  int size() const { return size_; }
  void* memory() const { return shared_.memory; }

  // Until all threads are here.
  void wait() {
    const int round = __atomic_load_n(&shared_.round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&shared_.num_waiting, 1, __ATOMIC_ACQ_REL) == size_) {
      shared_.num_waiting = 0;
      __atomic_store_n(&shared_.round, round + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int i = 0; __atomic_load_n(&shared_.round, __ATOMIC_ACQUIRE) == round; i++) {
      if (i < kPatience)
        pause();
      else
        sched_yield();
    }
  }

  // Memory for all threads, the same for each: they wait here.
  void* share_memory(size_t bytes) {
    static thread_local Scratch scratch;
    if (index_ == 0) shared_.more_memory = scratch.reserve(bytes);
    wait();
    return shared_.more_memory;
  }

  // f(i) for every i below n, in equal parts. The same thread gets the same i whenever n is the same.
  template <class Function>
  void divide(int64_t n, Function f) const {
    for (int64_t i = n * index_ / size_; i < n * (index_ + 1) / size_; i++) f(i);
  }

  // f(i, next) for every i below n, each by the thread that is free; `next` is what it will do after i, n for nothing.
  // Threads must wait between two such loops.
  template <class Function>
  void share(int64_t n, Function f) {
    int64_t& taken = shared_.taken[loop_++ % 2];
    // Nobody uses the other count: the last loop is over and the next one comes after a wait.
    if (index_ == 0) shared_.taken[loop_ % 2] = 0;
    const auto take = [&] { return smaller(__atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED), n); };
    for (int64_t i = take(), next; i < n; i = next) {
      next = take();
      f(i, next);
    }
  }

 private:
  static constexpr int kPatience = 1000;  // pauses, of some 20 ns: longer than threads are apart that all run

  struct Shared {
    void* memory;
    void* more_memory = nullptr;
    int64_t taken[2] = {};
    alignas(64) int num_waiting = 0;
    alignas(64) int round = 0;
  };

  explicit Team(Shared& shared) : shared_(shared), size_(omp_get_num_threads()), index_(omp_get_thread_num()) {}

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  Shared& shared_;
  int size_, index_;
  int loop_ = 0;
};

}  // namespace

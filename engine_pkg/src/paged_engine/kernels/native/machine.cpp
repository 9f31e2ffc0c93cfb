// What the machine offers: which variants its processor and system can run, and large memory pages.
#include <sys/mman.h>
#include <unistd.h>

#include "api.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#endif

#define EXPORT __attribute__((visibility("default")))

#if defined(__x86_64__)
static bool has_bits(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

static uint64_t enabled_states() {  // XCR0: register states that the operating system saves
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t(high) << 32 | low;
}

// Linux lets a process use tile registers only after it has asked.
static bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

extern "C" {

// Bits of the variants that this machine can run: 1 generic, 2 avx2, 4 avx512, 8 amx.
EXPORT int32_t supported_variants() {
  int32_t variants = 1;
#if defined(__x86_64__)
  uint32_t eax, ebx, ecx, edx;
  constexpr uint32_t kFma = 1 << 12, kOsxsave = 1 << 27, kAvx = 1 << 28, kF16c = 1 << 29;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !has_bits(ecx, kFma | kOsxsave | kAvx | kF16c)) return variants;
  const uint64_t states = enabled_states();
  if (!has_bits(states, 0x6) || !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return variants;
  constexpr uint32_t kAvx2 = 1 << 5, kAvx512 = 1 << 16 | 1 << 17 | 1 << 30 | 1u << 31;  // F, DQ, BW, VL
  constexpr uint32_t kVnni = 1 << 11, kTiles = 1 << 22 | 1 << 24, kBf16 = 1 << 5;
  if (!has_bits(ebx, kAvx2)) return variants;
  variants |= 2;
  const bool wide = has_bits(ebx, kAvx512) && has_bits(ecx, kVnni) && has_bits(states, 0xe6);
  const bool tiles = has_bits(edx, kTiles) && has_bits(states, 0x600e6);
  if (!wide || !__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) || !has_bits(eax, kBf16)) return variants;
  variants |= 4;
  if (tiles && may_use_tiles()) variants |= 8;
#endif
  return variants;
}

// Sizes of the structures of api.h, in their order there.
EXPORT void structure_sizes(int32_t* sizes) {
  sizes[0] = sizeof(PageLayout);
  sizes[1] = sizeof(AttentionLayer);
  sizes[2] = sizeof(AttentionStep);
  sizes[3] = sizeof(Heads);
  sizes[4] = sizeof(Rotary);
  sizes[5] = sizeof(Linear);
  sizes[6] = sizeof(DecoderLayer);
  sizes[7] = sizeof(DecoderStep);
}

// Asks for large memory pages for the whole ones inside [data, data + size): before they are first touched.
EXPORT void advise_huge_pages(void* data, int64_t size) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (uintptr_t(data) + page - 1) / page * page, end = (uintptr_t(data) + uintptr_t(size)) / page * page;
  if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}
}

// One variant of every kernel. Compiled once per instruction set with -DVARIANT=<name> and that set's flags.
#include "decoder.h"

#define JOIN_(name, variant) name##_##variant
#define JOIN(name, variant) JOIN_(name, variant)
#define EXPORT(name) __attribute__((visibility("default"))) JOIN(name, VARIANT)

// Work below which starting threads costs more than it saves, in elements.
static constexpr int64_t kSerialElements = 1 << 14;

extern "C" {

void EXPORT(attention)(const AttentionLayer* layer, const AttentionStep* step, const Heads* query, const void* cache,
                       const float* sinks, void* out) {
  Team::run(step->num_threads, step->num_sequences == 0, 0,
            [&](Team& team) { attend(*layer, *step, *query, cache, sinks, out, team); });
}

void EXPORT(write_pages)(const PageLayout* layout, const Heads* keys, const Heads* values, ElementType type,
                         const int64_t* slots, int64_t num_tokens, void* cache, int32_t num_threads) {
  with_page_type(*layout, [&](auto element) {
    const Pages<decltype(element)> pages(*layout, cache);
    Team::run(num_threads, num_tokens <= 16, 0,
              [&](Team& team) { write_pages(pages, *keys, *values, type, slots, num_tokens, team); });
  });
}

void EXPORT(rotate_and_write)(const AttentionLayer* layer, const Rotary* rotary, const Heads* query, const Heads* keys,
                              const Heads* values, const int64_t* slots, int64_t num_tokens, void* cache,
                              int32_t num_threads) {
  Team::run(num_threads, num_tokens <= 8, 0, [&](Team& team) {
    rotate_and_write(*layer, *rotary, *query, *keys, *values, slots, num_tokens, cache, team);
  });
}

void EXPORT(rms_norm)(const void* x, void* residual, const float* weight, void* out, int64_t num_rows, int64_t size,
                      float epsilon, ElementType type, ElementType residual_type, int32_t num_threads) {
  with_type(type, [&](auto element) {
    using Element = decltype(element);
    const auto run = [&](auto* sums) {
      Team::run(num_threads, num_rows * size <= kSerialElements, 0, [&](Team& team) {
        rms_norm((const Element*)x, sums, weight, (Element*)out, num_rows, size, epsilon, team);
      });
    };
    residual_type == kFloat32 ? run((float*)residual) : run((Element*)residual);
  });
}

void EXPORT(gate)(const void* gate_and_up, void* out, int64_t num_rows, int64_t size, Activation activation,
                  ElementType type, int32_t num_threads) {
  with_type(type, [&](auto element) {
    using Element = decltype(element);
    Team::run(num_threads, num_rows * size <= kSerialElements, 0, [&](Team& team) {
      gate((const Element*)gate_and_up, (Element*)out, num_rows, size, activation, team);
    });
  });
}

void EXPORT(pack_linear)(const void* weight, void* packed, int64_t out_features, int64_t in_features, ElementType type,
                         int32_t num_threads) {
  Team::run(num_threads, false, 0, [&](Team& team) {
    if (type == kFloat32)
      pack_linear((const float*)weight, (float*)packed, out_features, in_features, team);
    else
      pack_linear((const bf16*)weight, (bf16*)packed, out_features, in_features, team);
  });
}

void EXPORT(pack_int8)(const void* weight, uint8_t* packed, int64_t out_features, int64_t in_features, ElementType type,
                       int32_t num_threads) {
  with_type(type, [&](auto element) {
    Team::run(num_threads, false, 0, [&](Team& team) {
      pack_int8((const decltype(element)*)weight, packed, out_features, in_features, team);
    });
  });
}

void EXPORT(linear)(const Linear* layer, const void* x, int64_t x_stride, int64_t num_rows, void* y, int64_t y_stride,
                    int32_t num_threads) {
  Team::run(num_threads, num_rows == 0, shared_bytes(*layer, num_rows), [&](Team& team) {
    linear(*layer, x, x_stride, RowsFrom::kAnyThread, num_rows, y, y_stride, team);
  });
}

void EXPORT(decode)(const DecoderLayer* layers, int32_t num_layers, const DecoderStep* step) {
  decode(layers, num_layers, *step);
}

void EXPORT(argmax)(const void* x, int64_t num_rows, int64_t size, ElementType type, int64_t* out, int32_t num_threads) {
  with_type(type, [&](auto element) {
    Team::run(num_threads, num_rows * size <= 4 * kSerialElements, 0,
              [&](Team& team) { argmax((const decltype(element)*)x, num_rows, size, out, team); });
  });
}

void EXPORT(log_sum_exp)(const void* x, int64_t num_rows, int64_t size, ElementType type, float* out,
                         int32_t num_threads) {
  with_type(type, [&](auto element) {
    Team::run(num_threads, num_rows * size <= kSerialElements, 0,
              [&](Team& team) { log_sum_exp((const decltype(element)*)x, num_rows, size, out, team); });
  });
}
}

// A stack of decoder layers in one call: norm, projections, rotary embedding and page write, attention, output
// projection, norm, gated MLP. The residual is kept in float, and layers add to it without rounding in between.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "pages.h"

namespace {

inline void rms_norm(const void* x, float* residual, const float* weight, void* out, int64_t num_rows, int64_t size,
                     float epsilon, ElementType type, int num_threads) {
  with_type(type, [&](auto element) {
    using Element = decltype(element);
    rms_norm((const Element*)x, residual, weight, (Element*)out, num_rows, size, epsilon, num_threads);
  });
}

inline void rotate_and_write(const AttentionLayer& layer, const Rotary& rotary, const Heads& query, const Heads& keys,
                             const Heads& values, const int64_t* slots, int64_t num_tokens, void* cache, int num_threads) {
  with_type(layer.pages.element_type, [&](auto element) {
    const Pages<decltype(element)> pages(layer.pages, cache);
    rotate_and_write(pages, layer, rotary, query, keys, values, slots, num_tokens, num_threads);
  });
}

// residual += branch(…) for a projection that ends a branch: added at once, or first normed where the layer has a norm.
inline void end_branch(const DecoderStep& step, const DecoderLayer& layer, const Linear& projection, const float* norm,
                       const void* x, int64_t x_size) {
  const int threads = step.attention.num_threads;
  const int64_t rows = step.num_tokens, size = layer.hidden_size;
  float* out = norm ? step.projected : step.residual;
  linear(projection, x, x_size, rows, out, size, threads);
  if (!norm) return;
  const ElementType type = layer.attention.query_type;
  rms_norm(nullptr, out, norm, step.normed, rows, size, layer.norm_epsilon, type, threads);
  rms_norm(step.normed, step.residual, nullptr, nullptr, rows, size, 0, type, threads);
}

inline void decode_layer(const DecoderLayer& layer, const DecoderStep& step) {
  const AttentionLayer& attention = layer.attention;
  const ElementType type = attention.query_type;
  const int threads = step.attention.num_threads;
  const int64_t rows = step.num_tokens, size = layer.hidden_size, dim = attention.pages.head_dim;
  const int64_t num_heads = attention.num_query_heads, num_kv_heads = attention.pages.num_kv_heads;
  const int64_t width = (num_heads + 2 * num_kv_heads) * dim;

  rms_norm(nullptr, step.residual, layer.input_norm, step.normed, rows, size, layer.norm_epsilon, type, threads);
  linear(layer.qkv, step.normed, size, rows, step.qkv, width, threads);
  const Heads query = {step.qkv, width, dim};
  const Heads keys = {at(step.qkv, num_heads * dim, type), width, dim};
  const Heads values = {at(step.qkv, (num_heads + num_kv_heads) * dim, type), width, dim};
  Rotary rotary = layer.rotary;
  rotary.positions = step.positions;
  rotate_and_write(attention, rotary, query, keys, values, step.slots, rows, layer.cache, threads);
  attend(attention, step.attention, query, layer.cache, nullptr, step.attended);
  end_branch(step, layer, layer.attention_output, layer.attention_output_norm, step.attended, num_heads * dim);

  rms_norm(nullptr, step.residual, layer.mlp_norm, step.normed, rows, size, layer.norm_epsilon, type, threads);
  const int64_t gated_size = layer.gate_and_up.out_features / 2;
  linear(layer.gate_and_up, step.normed, size, rows, step.gated, gated_size, threads);
  end_branch(step, layer, layer.down, layer.mlp_output_norm, step.gated, gated_size);
}

}  // namespace

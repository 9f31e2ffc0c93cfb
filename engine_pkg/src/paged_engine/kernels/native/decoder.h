// A stack of decoder layers in one call: norm, projections, rotary embedding and page write, attention, output
// projection, norm, gated MLP. The residual is kept in float, and layers add to it without rounding in between.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "pages.h"

namespace {

inline void rms_norm(const void* x, float* residual, const float* weight, void* out, int64_t num_rows, int64_t size,
                     float epsilon, ElementType type, Team& team) {
  with_type(type, [&](auto element) {
    using Element = decltype(element);
    rms_norm((const Element*)x, residual, weight, (Element*)out, num_rows, size, epsilon, team);
  });
}

inline void rotate_and_write(const AttentionLayer& layer, const Rotary& rotary, const Heads& query, const Heads& keys,
                             const Heads& values, const int64_t* slots, int64_t num_tokens, void* cache, Team& team) {
  with_page_type(layer.pages, [&](auto element) {
    const Pages<decltype(element)> pages(layer.pages, cache);
    rotate_and_write(pages, layer, rotary, query, keys, values, slots, num_tokens, team);
  });
}

// residual += branch(…) for a projection that ends a branch: added at once, or first normed where the layer has a norm.
inline void end_branch(const DecoderStep& step, const DecoderLayer& layer, const Linear& projection, const float* norm,
                       const void* x, int64_t x_size, Team& team) {
  const int64_t rows = step.num_tokens, size = layer.hidden_size;
  float* out = norm ? step.projected : step.residual;
  linear(projection, x, x_size, RowsFrom::kAnyThread, rows, out, size, team);
  if (!norm) return;
  const ElementType type = layer.attention.query_type;
  rms_norm(nullptr, out, norm, step.normed, rows, size, layer.norm_epsilon, type, team);
  rms_norm(step.normed, step.residual, nullptr, nullptr, rows, size, 0, type, team);
}

inline void decode_layer(const DecoderLayer& layer, const DecoderStep& step, Team& team) {
  const AttentionLayer& attention = layer.attention;
  const ElementType type = attention.query_type;
  const int64_t rows = step.num_tokens, size = layer.hidden_size, dim = attention.pages.head_dim;
  const int64_t num_heads = attention.num_query_heads, num_kv_heads = attention.pages.num_kv_heads;
  const int64_t width = (num_heads + 2 * num_kv_heads) * dim;

  rms_norm(nullptr, step.residual, layer.input_norm, step.normed, rows, size, layer.norm_epsilon, type, team);
  linear(layer.qkv, step.normed, size, RowsFrom::kOwnThread, rows, step.qkv, width, team);
  const Heads query = {step.qkv, width, dim};
  const Heads keys = {at(step.qkv, num_heads * dim, type), width, dim};
  const Heads values = {at(step.qkv, (num_heads + num_kv_heads) * dim, type), width, dim};
  Rotary rotary = layer.rotary;
  rotary.positions = step.positions;
  rotate_and_write(attention, rotary, query, keys, values, step.slots, rows, layer.cache, team);
  attend(attention, step.attention, query, layer.cache, nullptr, step.attended, team);
  end_branch(step, layer, layer.attention_output, layer.attention_output_norm, step.attended, num_heads * dim, team);

  rms_norm(nullptr, step.residual, layer.mlp_norm, step.normed, rows, size, layer.norm_epsilon, type, team);
  const int64_t gated_size = layer.gate_and_up.out_features / 2;
  linear(layer.gate_and_up, step.normed, size, RowsFrom::kOwnThread, rows, step.gated, gated_size, team);
  end_branch(step, layer, layer.down, layer.mlp_output_norm, step.gated, gated_size, team);
}

// All layers in one team, since starting one takes longer than waiting for its threads.
inline void decode(const DecoderLayer* layers, int num_layers, const DecoderStep& step) {
  size_t bytes = 0;
  for (int i = 0; i < num_layers; i++) {
    const DecoderLayer& layer = layers[i];
    const Linear linears[] = {layer.qkv, layer.attention_output, layer.gate_and_up, layer.down};
    for (const Linear& each : linears) bytes = larger(bytes, shared_bytes(each, step.num_tokens));
  }
  Team::run(step.attention.num_threads, false, bytes, [&](Team& team) {
    for (int i = 0; i < num_layers; i++) decode_layer(layers[i], step, team);
  });
}

}  // namespace

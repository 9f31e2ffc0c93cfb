// Softmax over spans of keys, merged one span after the other.
#pragma once

#include "api.h"
#include "panels.h"

namespace {

// Running softmax of a block of rows: the largest score (in powers of two), the sum of weights, and the weighted values
// not yet divided by it.
struct State {
  float* maxima;
  float* sums;
  float* values;  // [rows][dim]
  int dim;

  static size_t floats(int rows, int dim) { return size_t(rows) * (dim + 2); }
  State(float* memory, int rows, int dim_)
      : maxima(memory), sums(memory + rows), values(memory + 2 * rows), dim(dim_) {}
  void clear(int rows) const {
    for (int r = 0; r < rows; r++) maxima[r] = -kInfinity;
    memset(sums, 0, rows * sizeof(float));
    memset(values, 0, size_t(rows) * dim * sizeof(float));
  }
};

// Adds one span's softmax to a row's, its values times `scale`; never inlined, so that every caller rounds alike.
__attribute__((noinline)) void merge(const State& state, int row, float maximum, float sum, const float* values, float scale) {
  if (maximum == -kInfinity) return;
  const float merged = larger(state.maxima[row], maximum);
  const float old_factor = power_of_2(state.maxima[row] - merged), new_factor = power_of_2(maximum - merged);
  state.maxima[row] = merged;
  state.sums[row] = state.sums[row] * old_factor + sum * new_factor;
  const Vector old_factors = broadcast(old_factor), new_factors = broadcast(new_factor);
  float* out = state.values + int64_t(row) * state.dim;
  for (int d = 0; d < state.dim; d += kWidth)
    store(out + d, multiply_add(load(out + d), old_factors, load(values + d) * scale * new_factors));
}

// Softmax weights of one row over the panels [panel_begin, panel_end) of a span, zero outside the keys [begin, end):
// 2^(x - maximum), where x are the scaled scores in powers of two and the maximum is the largest. keep(key, vector) takes them.
template <class Keep>
void softmax(const AttentionLayer& layer, float* scores, float score_scale, int panel_begin, int panel_end, int begin, int end,
             float* row_maximum, float* row_sum, Keep keep) {
  const int first = panel_begin * kPanelWidth, last = panel_end * kPanelWidth;
  begin = smaller(larger(begin, first), last);
  end = larger(smaller(end, last), begin);
  float scale = layer.scale * score_scale * kLog2E;
  if (layer.soft_cap > 0) {
    const Vector inverse = broadcast(layer.scale * score_scale / layer.soft_cap);
    for (int i = first; i < last; i += kWidth) store(scores + i, hyperbolic_tangent(load(scores + i) * inverse));
    scale = layer.soft_cap * kLog2E;
  }
  for (int i = first; i < begin; i++) scores[i] = -kInfinity;
  for (int i = end; i < last; i++) scores[i] = -kInfinity;
  Vector maxima = broadcast(-kInfinity);
  for (int i = first; i < last; i += kWidth) maxima = maximum(load(scores + i), maxima);
  *row_maximum = horizontal_maximum(maxima) * scale;
  *row_sum = 0;
  if (*row_maximum == -kInfinity) {
    for (int i = first; i < last; i += kWidth) keep(i, Vector{});
    return;
  }
  Vector sums = {};
  const Vector scales = broadcast(scale), shift = broadcast(-*row_maximum);
  for (int i = first; i < last; i += kWidth) {
    const Vector weight = power_of_2(multiply_add(load(scores + i), scales, shift));
    sums += weight;
    keep(i, weight);
  }
  *row_sum = horizontal_sum(sums);
}

}  // namespace

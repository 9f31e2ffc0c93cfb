// RMS norm with a residual, gated activations, and reductions over rows.
#pragma once

#include "elements.h"
#include "team.h"

namespace {

inline Vector activate(Activation activation, Vector x) {
  if (activation == kSilu) return x / (1.0f + exponential(-x));
  // x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3) is x / (1 + e^(-2u)).
  const Vector u = x * (1.5957691216057308f + 0.07135481282725f * x * x);
  return x / (1.0f + exponential(-u));
}

// residual += x where x is given; out = residual / rms(residual) * weight where out is given. out may be x. Rows are divided.
template <class Element, class Residual>
void rms_norm(const Element* x, Residual* residual, const float* weight, Element* out, int64_t num_rows, int64_t size,
              float epsilon, Team& team) {
  team.wait();
  team.divide(num_rows, [&](int64_t row) {
    Residual* r = residual + row * size;
    Vector squares = {};
    for_each_vector(size, [&](int64_t i, int count) {
      Vector v = load(r + i, count);
      if (x) {
        store(r + i, v + load(x + row * size + i, count), count);
        v = load(r + i, count);
      }
      squares = multiply_add(v, v, squares);
    });
    if (!out) return;
    const Vector factor = broadcast(1.0f / __builtin_sqrtf(horizontal_sum(squares) / float(size) + epsilon));
    for_each_vector(size, [&](int64_t i, int count) {
      store(out + row * size + i, load(r + i, count) * factor * load(weight + i, count), count);
    });
  });
}

// out = activation(gate) * up for rows of [gate, up], `size` elements each.
template <class Element>
void gate(const Element* gate_and_up, Element* out, int64_t num_rows, int64_t size, Activation activation,
          Team& team) {
  team.divide(num_rows, [&](int64_t row) {
    const Element* gates = gate_and_up + row * 2 * size;
    for_each_vector(size, [=](int64_t i, int count) {
      const Vector activated = activate(activation, load(gates + i, count));
      store(out + row * size + i, activated * load(gates + size + i, count), count);
    });
  });
}

// The first position of the largest element; of the first NaN where there is one.
template <class Element>
int64_t argmax_row(const Element* x, int64_t size) {
  float highest = -kInfinity;
  constexpr int64_t kBlock = 4096;
  int64_t best_block = 0;
  for (int64_t block = 0; block < size; block += kBlock) {
    const int64_t end = smaller(size, block + kBlock);
    Vector maxima = broadcast(-kInfinity), nans = {};
    int64_t i = block;
    for (; i + kWidth <= end; i += kWidth) {
      const Vector v = load(x + i);
      maxima = maximum(v, maxima);
      nans += v * 0.0f;  // NaN and infinities leave a NaN here
    }
    float block_highest = horizontal_maximum(maxima);
    bool suspicious = horizontal_sum(nans) != 0.0f;
    for (; i < end; i++) {
      const float v = to_float(x[i]);
      block_highest = larger(block_highest, v);
      suspicious |= v != v;
    }
    if (suspicious)
      for (int64_t j = block; j < end; j++) {
        const float v = to_float(x[j]);
        if (v != v) return j;
      }
    if (block_highest > highest) {
      highest = block_highest;
      best_block = block;
    }
  }
  for (int64_t i = best_block; i < size; i++)
    if (to_float(x[i]) == highest) return i;
  return 0;
}

template <class Element>
void argmax(const Element* x, int64_t num_rows, int64_t size, int64_t* out, Team& team) {
  team.divide(num_rows, [&](int64_t row) { out[row] = argmax_row(x + row * size, size); });
}

template <class Element>
float log_sum_exp_row(const Element* x, int64_t size) {
  Vector maxima = broadcast(-kInfinity);
  for_each_vector(size, [&](int64_t i, int count) {
    Vector v = load(x + i, count);
    for (int lane = count; lane < kWidth; lane++) v[lane] = -kInfinity;
    maxima = maximum(v, maxima);
  });
  const float highest = horizontal_maximum(maxima);
  if (highest == -kInfinity || highest == kInfinity) return highest;
  const Vector shift = broadcast(highest);
  Vector sums = {};
  for_each_vector(size, [&](int64_t i, int count) {
    Vector v = exponential(load(x + i, count) - shift);
    for (int lane = count; lane < kWidth; lane++) v[lane] = 0;
    sums += v;
  });
  return highest + __builtin_logf(horizontal_sum(sums));
}

template <class Element>
void log_sum_exp(const Element* x, int64_t num_rows, int64_t size, float* out, Team& team) {
  team.divide(num_rows, [&](int64_t row) { out[row] = log_sum_exp_row(x + row * size, size); });
}

}  // namespace

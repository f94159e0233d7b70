//===- SampleOrder.cpp - which sample has which place ---------------------===//
#include "fsdp/Runtime/Files/SampleOrder.h"
#include "fsdp/Runtime/Error.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

namespace fsdp::runtime {

uint64_t mixBits(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

namespace {

/// Of 3 rounds on, a random Feistel network cannot be told from a random
/// permutation by few of its values (Luby and Rackoff); more of them cost
/// little.
constexpr uint64_t kRounds = 8;

/// The smallest number whose square is at least `x`.
uint64_t ceilSqrt(uint64_t x) {
  auto root = uint64_t(std::sqrt(double(x)));
  while (__uint128_t(root) * root >= x && root > 0)
    --root;
  while (__uint128_t(root) * root < x)
    ++root;
  return root;
}

} // namespace

Permutation::Permutation(uint64_t size, uint64_t key)
    : size(size), left(ceilSqrt(size)), right((size + left - 1) / left),
      key(key) {}

uint64_t Permutation::operator()(uint64_t i) const {
  do {
    uint64_t l = i / right, r = i % right;
    for (uint64_t round = 0; round < kRounds; round += 2) {
      l = (l + mixBits(mixBits(key + round) ^ r) % left) % left;
      r = (r + mixBits(mixBits(key + round + 1) ^ l) % right) % right;
    }
    i = l * right + r;
  } while (i >= size);
  return i;
}

SampleOrder::SampleOrder(std::vector<int64_t> sizes,
                         const std::vector<int64_t> &weights,
                         std::optional<uint64_t> seed)
    : counts(std::move(sizes)), seed(seed) {
  for (int64_t count : counts) {
    begins.push_back(total);
    if (__builtin_add_overflow(total, count, &total))
      throw InputError("--data: expected at most 2^63 - 1 samples in all");
  }
  if (weights.empty())
    return;
  int64_t divisor = 0;
  for (int64_t weight : weights)
    divisor = std::gcd(divisor, weight);
  __int128 sum = 0;
  for (int64_t weight : weights) {
    shares.push_back(weight / divisor);
    sum += shares.back();
  }
  if (sum > kMaxPeriod)
    throw InputError("--data: expected weights that repeat within " +
                     std::to_string(kMaxPeriod) +
                     " samples; round them to fewer digits");
  // The source that is furthest behind its share is next. It has less than its
  // share, so no source ever exceeds its share by a whole sample. At the end of
  // the period, where shares are whole, each source has exactly its share.
  auto length = int64_t(sum);
  std::vector<int64_t> given(shares.size());
  for (int64_t i = 0; i < length; ++i) {
    size_t next = 0;
    auto behind = [&](size_t s) {
      return shares[s] * (i + 1) - length * given[s];
    };
    for (size_t s = 1; s < shares.size(); ++s)
      if (behind(s) > behind(next))
        next = s;
    period.push_back({uint32_t(next), uint32_t(given[next]++)});
  }
}

int64_t SampleOrder::permuted(size_t stream, int64_t number,
                              int64_t count) const {
  int64_t epoch = number / count, sample = number % count;
  if (!seed)
    return sample;
  uint64_t key = mixBits(mixBits(mixBits(*seed) + stream) + uint64_t(epoch));
  return int64_t(Permutation(uint64_t(count), key)(uint64_t(sample)));
}

SampleOrder::Place SampleOrder::at(int64_t position) const {
  if (shares.empty()) {
    int64_t sample = permuted(0, position, total);
    auto source =
        size_t(std::upper_bound(begins.begin(), begins.end(), sample) -
               begins.begin() - 1);
    return {source, sample - begins[source]};
  }
  auto length = int64_t(period.size());
  const Slot &slot = period[size_t(position % length)];
  int64_t number =
      position / length * shares[slot.source] + int64_t(slot.before);
  return {slot.source, permuted(slot.source, number, counts[slot.source])};
}

} // namespace fsdp::runtime

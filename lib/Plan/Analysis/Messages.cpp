//===- Messages.cpp - which gradients FSDP2 reduces together --------------===//
#include "fsdp/Plan/Messages.h"
#include "fsdp/Plan/DeviceBuffers.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>

namespace fsdp::plan {

/// Places of parameters in one row.
static std::vector<MessagePlace> layOutRow(const Plan &plan,
                                           const std::vector<int32_t> &params) {
  std::vector<MessagePlace> places;
  int64_t row = 0;
  for (int32_t param : params) {
    places.push_back({row, 0});
    row += chunkElements(plan, param);
  }
  for (MessagePlace &place : places)
    place.row = row;
  return places;
}

Messages::Messages(const Plan &plan)
    : plan(plan), ofOthers(plan.params.size()) {
  std::set<int32_t> reduced;
  for (const Instruction &instruction : plan.instructions)
    if (const auto *reduce = std::get_if<ReduceScatter>(&instruction.kind))
      reduced.insert(reduce->params.begin(), reduce->params.end());
  std::map<std::string, std::vector<int32_t>> units;
  for (int32_t param : reduced)
    if (const Param &own = plan.params[size_t(param)]; !own.reducedWith.empty())
      units[own.reducedWith].push_back(param);
  for (const auto &[name, params] : units) {
    std::vector<MessagePlace> places = layOutRow(plan, params);
    for (size_t i = 0; i < params.size(); ++i)
      ofOthers[size_t(params[i])] = places[i];
  }
}

std::vector<MessagePlace>
Messages::messagePlaces(const std::vector<int32_t> &params) const {
  std::vector<MessagePlace> places = layOutRow(plan, params);
  for (size_t i = 0; i < params.size(); ++i)
    if (!plan.params[size_t(params[i])].reducedWith.empty())
      places[i] = ofOthers[size_t(params[i])];
  return places;
}

int64_t ringPiece(int64_t elements, int64_t width, int64_t ranks) {
  auto divideUp = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  constexpr int64_t kMostBytes = int64_t(1) << 20; // of a segment
  int64_t bytes = elements * width;
  int64_t least = divideUp(bytes, kMostBytes / width * width);
  int64_t segments = divideUp(std::max(least, 2 * ranks), ranks) * ranks;
  int64_t segment = divideUp(divideUp(bytes, segments), width);
  return segments / ranks * segment;
}

} // namespace fsdp::plan

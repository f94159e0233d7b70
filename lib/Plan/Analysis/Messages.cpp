//===- Messages.cpp - which gradients FSDP2 reduces together --------------===//
#include "fsdp/Plan/Messages.h"
#include "fsdp/Plan/DeviceBuffers.h"

#include <algorithm>
#include <map>
#include <string>

namespace fsdp::plan {

std::vector<MessagePlace> messagePlaces(const Plan &plan) {
  std::vector<bool> isReduced(plan.params.size());
  for (const Instruction &instruction : plan.instructions)
    if (const auto *reduce = std::get_if<ReduceScatter>(&instruction.kind))
      for (int32_t param : reduce->params)
        isReduced[size_t(param)] = true;
  std::vector<MessagePlace> places(plan.params.size());
  std::map<std::string, int64_t> rows;
  auto unitOf = [&](const Param &param) -> const std::string & {
    return param.reducedWith.empty() ? plan.units[size_t(param.unit)].name
                                     : param.reducedWith;
  };
  for (size_t p = 0; p < places.size(); ++p)
    if (isReduced[p]) {
      int64_t &row = rows[unitOf(plan.params[p])];
      places[p].begin = row;
      row += chunkElements(plan, int32_t(p));
    }
  for (size_t p = 0; p < places.size(); ++p)
    if (isReduced[p])
      places[p].row = rows[unitOf(plan.params[p])];
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

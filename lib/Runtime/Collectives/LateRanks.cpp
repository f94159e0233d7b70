//===- LateRanks.cpp - who has not come to a collective -------------------===//
#include "fsdp/Runtime/Collectives/LateRanks.h"

namespace fsdp::runtime {

std::string CollectiveName::text() const {
  return what + " (collective " + std::to_string(number) +
         " of communicator \"" + communicator + "\")";
}

std::string describeTimeout(const CollectiveName &collective,
                            std::chrono::milliseconds timeout) {
  return collective.text() + " has not finished after " +
         std::to_string(timeout.count() / 1000) + " s";
}

std::string nameRanks(const std::vector<int64_t> &ranks) {
  std::string text;
  for (int64_t rank : ranks)
    text += (text.empty() ? "" : ", ") + std::to_string(rank);
  if (ranks.empty())
    return text;
  return (ranks.size() == 1 ? "rank " : "ranks ") + text;
}

std::string describeLateRanks(int64_t number, const std::vector<int64_t> &ranks,
                              const CollectiveCounts &counts) {
  std::vector<int64_t> late, silent;
  for (int64_t rank : ranks) {
    auto found = counts.find(rank);
    if (found == counts.end())
      silent.push_back(rank);
    else if (found->second < number)
      late.push_back(rank);
  }
  std::string text;
  if (!late.empty())
    text = nameRanks(late) + (late.size() == 1 ? " has" : " have") +
           " not come to it";
  if (!silent.empty())
    text += (text.empty() ? "" : "; ") + nameRanks(silent) +
            (silent.size() == 1 ? " does" : " do") + " not answer";
  return text.empty() ? "all its ranks have come to it" : text;
}

} // namespace fsdp::runtime

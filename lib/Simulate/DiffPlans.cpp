//===- DiffPlans.cpp - what changed from one plan to another --------------===//
#include "fsdp/Simulate/DiffPlans.h"

#include "fsdp/Plan/Memory.h"
#include "fsdp/Plan/ParseJson.h"
#include "fsdp/Simulate/Collectives.h"
#include "fsdp/Simulate/CostModel.h"
#include "fsdp/Simulate/Format.h"
#include "fsdp/Simulate/Simulator.h"

#include "llvm/ADT/MapVector.h"
#include "llvm/ADT/StringExtras.h"
#include "llvm/Support/Format.h"
#include "llvm/Support/raw_ostream.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

namespace fsdp::simulate {

using namespace plan;

namespace {

struct Entry {
  std::string text;
  std::optional<double> number = std::nullopt;
  std::string why = {}; ///< of a collective's place
};

/// What a plan is like, by section and name.
class Summary {
public:
  Summary(const Plan &plan, const DeviceModel *device) : plan(plan) {
    describePlan();
    uses = findCollectives(plan);
    describeUnits();
    describeCollectives();
    describeMemory();
    describeTraffic();
    if (device)
      describeTime(*device);
  }

  using Key = std::pair<std::string, std::string>;
  llvm::MapVector<Key, Entry, std::map<Key, unsigned>> rows;

private:
  void text(const std::string &section, const std::string &name,
            std::string value) {
    rows[{section, name}] = {std::move(value)};
  }
  void count(const std::string &section, const std::string &name, int64_t value,
             const std::string &why = {}) {
    rows[{section, name}] = {std::to_string(value), double(value), why};
  }
  void bytes(const std::string &section, const std::string &name,
             int64_t value) {
    rows[{section, name}] = {formatBytes(value), double(value)};
  }
  void seconds(const std::string &section, const std::string &name,
               double value) {
    rows[{section, name}] = {formatMilliseconds(value), value};
  }

  void describePlan() {
    text("plan", "model", plan.model);
    count("plan", "ranks", plan.worldSize);
    if (plan.modelParallel)
      count("plan", "ranks of the job", plan.jobRanks());
    count("plan", "replicas", plan.replicas);
    count("plan", "microbatches a step", plan.accumulationSteps);
    text("plan", "optimizer", plan.optimizer.name);
    count("plan", "units", int64_t(plan.units.size()));
    count("plan", "instructions", int64_t(plan.instructions.size()));
    count("plan", "instructions of the evaluation",
          int64_t(plan.evaluation.size()));
  }

  void describeUnits() {
    std::vector<int64_t> recomputed(plan.units.size()),
        reshards(plan.units.size());
    std::vector<std::optional<int32_t>> unitOf(plan.modules.size());
    for (const Instruction &instruction : plan.instructions) {
      if (const auto *reshard = std::get_if<Reshard>(&instruction.kind))
        reshards[size_t(reshard->unit)] += runsPerStep(plan, instruction);
      const auto *call = std::get_if<Call>(&instruction.kind);
      if (!call || !call->recompute || instruction.module < 0)
        continue;
      auto &unit = unitOf[size_t(instruction.module)];
      if (!unit)
        unit = unitOfModule(plan, plan.modules[size_t(instruction.module)]);
      if (*unit != -1)
        ++recomputed[size_t(*unit)];
    }
    for (size_t u = 0; u < plan.units.size(); ++u) {
      const Unit &unit = plan.units[u];
      double whole = 0;
      for (int32_t param : unit.params)
        whole += paddedBytes(plan, param,
                             plan.params[size_t(param)].computeSpec().dtype);
      int64_t gathers = 0;
      for (const CollectiveUse &use : uses)
        if (use.kind == Stream::AllGather && use.unit == int32_t(u))
          gathers += use.times;
      std::string prefix = unit.name + ": ";
      count("schedule", prefix + "parameters", int64_t(unit.params.size()));
      bytes("schedule", prefix + "bytes gathered", int64_t(whole));
      count("schedule", prefix + "gathers a step", gathers);
      count("schedule", prefix + "reshards a step", reshards[u]);
      count("schedule", prefix + "calls recomputed in backward", recomputed[u]);
      text("schedule", prefix + "offloaded", unit.cpuOffload ? "yes" : "no");
    }
  }

  /// "layers.0, all_gather 2".
  std::vector<std::string> collectiveNames() const {
    std::map<std::pair<int32_t, Stream>, int> numbers;
    std::vector<std::string> names;
    for (const CollectiveUse &use : uses)
      names.push_back(
          (use.unit < 0 ? "no unit" : plan.units[size_t(use.unit)].name) +
          ", " + std::string(streamName(use.kind)) + " " +
          std::to_string(++numbers[{use.unit, use.kind}]));
    return names;
  }

  void describeCollectives() {
    std::vector<std::string> names = collectiveNames();
    std::array<int64_t, kNumStreams> underWay = {}, most = {};
    std::multimap<int32_t, Stream> ends;
    for (size_t i = 0; i < uses.size(); ++i) {
      const CollectiveUse &use = uses[i];
      bool begins = use.kind == Stream::AllGather;
      count("schedule",
            names[i] + (begins ? ": calls from launch to first use"
                               : ": calls from launch to wait"),
            begins ? use.callsToUse : use.callsToWait,
            plan.instructions[size_t(use.instruction)].why);
      while (!ends.empty() && ends.begin()->first < use.instruction) {
        --underWay[size_t(ends.begin()->second)];
        ends.erase(ends.begin());
      }
      most[size_t(use.kind)] =
          std::max(most[size_t(use.kind)], ++underWay[size_t(use.kind)]);
      if (use.wait >= 0)
        ends.emplace(use.wait, use.kind);
    }
    for (size_t kind = 1; kind < kNumStreams; ++kind)
      if (most[kind] > 0)
        count("schedule",
              std::string(streamName(Stream(kind))) + " in flight at once",
              most[kind]);
  }

  void describeMemory() {
    MemoryModel model = arenaModel(plan);
    Memory memory = replayMemory(plan, model);
    auto staticUses = staticBytes(plan, model);
    text("memory", "gathered parameters are",
         model == MemoryModel::Device ? "on the device" : "in shared memory");
    bytes("memory", "peak a rank", peakBytes(plan, model));
    bytes("memory", "arena", plan.arena ? plan.arena->bytes : 0);
    bytes("memory", "lower bound of the arena",
          plan.arena ? plan.arena->lowerBound : 0);
    for (size_t use = 0; use < kNumMemoryUses; ++use)
      if (staticUses[use] != 0)
        bytes("memory",
              "all the time: " + std::string(memoryUseName(MemoryUse(use))),
              staticUses[use]);
    BytesByUse uses = memory.usesAt(memory.peakPosition());
    for (size_t use = 0; use < kNumMemoryUses; ++use)
      if (uses[use] != 0)
        bytes("memory",
              "at the peak: " + std::string(memoryUseName(MemoryUse(use))),
              uses[use]);
  }

  void describeTraffic() {
    std::array<int64_t, kNumStreams> numbers = {}, moved = {};
    for (const CollectiveUse &use : uses) {
      numbers[size_t(use.kind)] += use.times;
      moved[size_t(use.kind)] += use.times * use.bytes;
    }
    for (size_t kind = 1; kind < kNumStreams; ++kind)
      if (numbers[kind] != 0) {
        std::string name(streamName(Stream(kind)));
        count("traffic", name + ", a step", numbers[kind]);
        bytes("traffic", name + ", bytes a rank", moved[kind]);
      }
  }

  void describeTime(const DeviceModel &device) {
    StepCost cost = costOf(plan, device);
    Timeline timeline = simulate(plan, cost, device);
    seconds("time", "step", timeline.seconds);
    seconds("time", "exposed communication", timeline.exposedCommunication());
    for (size_t kind = 1; kind < kNumStreams; ++kind)
      if (timeline.busy[kind] > 0)
        seconds("time", "exposed " + std::string(streamName(Stream(kind))),
                timeline.exposed[kind]);
    std::vector<std::string> names = collectiveNames();
    std::map<int32_t, size_t> indexOf;
    for (size_t i = 0; i < uses.size(); ++i)
      indexOf[uses[i].instruction] = i;
    std::map<size_t, bool> seen; // the first microbatch that has it
    for (const CollectiveTime &time :
         timeCollectives(plan, uses, timeline, device)) {
      const Span &span = timeline.spans[size_t(time.span)];
      size_t index = indexOf.at(span.instruction);
      if (std::exchange(seen[index], true))
        continue;
      if (time.use >= 0)
        seconds("time", names[index] + ": launch to first use",
                time.use - span.begin);
      seconds("time", names[index] + ": exposed", time.exposed);
    }
  }

  const Plan &plan;
  std::vector<CollectiveUse> uses;
};

/// The name with every number in it a star.
std::string patternOf(const std::string &name) {
  std::string pattern;
  for (char c : name)
    if (!llvm::isDigit(c))
      pattern += c;
    else if (pattern.empty() || pattern.back() != '*')
      pattern += '*';
  return pattern;
}

struct Row {
  std::string section, name, a, b, change;
  std::string whyA, whyB; ///< where they differ
  std::string last = "";  ///< of several that show the same
  int64_t times = 1;

  std::string title() const {
    if (times == 1)
      return name;
    // What they have in common at the end is said once.
    size_t same = name.rfind(": ");
    std::string head = same == std::string::npos ? name : name.substr(0, same);
    std::string tail = same == std::string::npos ? "" : name.substr(same);
    std::string to =
        same == std::string::npos ? last : last.substr(0, last.rfind(": "));
    return head + " … " + to + " (" + std::to_string(times) + ")" + tail;
  }
};

std::string changeOf(const Entry &a, const Entry &b) {
  if (!a.number || !b.number || *a.number == 0)
    return "";
  std::string text;
  llvm::raw_string_ostream(text)
      << llvm::format("%+.1f %%", 100 * (*b.number / *a.number - 1));
  return text;
}

/// Columns on a terminal: the ellipsis is one.
size_t widthOf(const std::string &text) {
  return size_t(std::count_if(text.begin(), text.end(),
                              [](char c) { return (c & 0xC0) != 0x80; }));
}
std::string padded(const std::string &text, size_t width, bool left) {
  size_t has = widthOf(text);
  std::string space(has < width ? width - has : 0, ' ');
  return left ? text + space : space + text;
}

std::vector<Row> differingRows(const Summary &a, const Summary &b) {
  std::vector<Row> rows;
  std::map<std::vector<std::string>, size_t> merged;
  auto add = [&](const Summary::Key &key, const Entry &x, const Entry &y) {
    if (x.text == y.text)
      return;
    bool sameWhy = x.why == y.why;
    std::string whyX = sameWhy ? "" : x.why, whyY = sameWhy ? "" : y.why;
    std::vector<std::string> shown = {key.first,       patternOf(key.second),
                                      x.text,          y.text,
                                      patternOf(whyX), patternOf(whyY)};
    auto [it, isNew] = merged.try_emplace(shown, rows.size());
    if (isNew) {
      rows.push_back(
          {key.first, key.second, x.text, y.text, changeOf(x, y), whyX, whyY});
      return;
    }
    rows[it->second].last = key.second;
    ++rows[it->second].times;
  };
  const Entry none{"-"};
  for (const auto &[key, entry] : a.rows) {
    auto it = b.rows.find(key);
    add(key, entry, it == b.rows.end() ? none : it->second);
  }
  for (const auto &[key, entry] : b.rows)
    if (a.rows.find(key) == a.rows.end())
      add(key, none, entry);
  // By section, in the order of the sections.
  std::map<std::string, size_t> order;
  for (const auto *summary : {&a, &b})
    for (const auto &[key, entry] : summary->rows)
      order.try_emplace(key.first, order.size());
  std::vector<Row> sorted;
  for (size_t section = 0; section < order.size(); ++section)
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(sorted),
                 [&](const Row &row) { return order[row.section] == section; });
  return sorted;
}

/// The value in JSON, cut after some characters; "none" for null.
std::string shown(const Json *value) {
  constexpr size_t kMost = 40;
  if (!value)
    return "none";
  std::string text = value->dump();
  size_t end = kMost;
  if (text.size() <= end)
    return text;
  while ((text[end] & 0xC0) == 0x80) // within a character
    --end;
  return text.substr(0, end) + "...";
}

/// Where the JSON forms of two plans differ first, with what is there:
/// "instructions[3].group: none, 2"; empty where they do not.
std::string firstDifference(const Json *a, const Json *b,
                            const std::string &path) {
  if (a && b && *a == *b)
    return "";
  if (a && b && a->is_array() && b->is_array()) {
    for (size_t i = 0; i < std::max(a->size(), b->size()); ++i) {
      const Json *left = i < a->size() ? &(*a)[i] : nullptr;
      const Json *right = i < b->size() ? &(*b)[i] : nullptr;
      if (!left || !right || *left != *right)
        return firstDifference(left, right,
                               path + '[' + std::to_string(i) + ']');
    }
  } else if (a && b && a->is_object() && b->is_object()) {
    for (const Json *side : {a, b})
      for (const auto &[key, value] : side->items()) {
        auto left = a->find(key), right = b->find(key);
        const Json *inA = left == a->end() ? nullptr : &*left;
        const Json *inB = right == b->end() ? nullptr : &*right;
        if (!inA || !inB || *inA != *inB)
          return firstDifference(inA, inB,
                                 path.empty() ? key : path + '.' + key);
      }
  }
  return path + ": " + shown(a) + ", " + shown(b);
}

/// One without the digest, which always differs.
Json treeOf(const std::string &text) {
  Json tree = parseJson(text, "plan");
  tree.erase("digest");
  return tree;
}

} // namespace

std::string printDifference(const Plan &a, const Plan &b,
                            const DeviceModel *device) {
  std::string textA = printPlan(a), textB = printPlan(b);
  if (textA == textB)
    return "no difference\n";
  std::vector<Row> rows = differingRows({a, device}, {b, device});
  std::string text;
  llvm::raw_string_ostream os(text);
  if (rows.empty()) {
    Json treeA = treeOf(textA), treeB = treeOf(textB);
    std::string first = firstDifference(&treeA, &treeB, "");
    os << "same schedule, memory and traffic; the plans differ first in "
       << (first.empty() ? "the sign of a zero" : first) << '\n';
    return text;
  }
  std::array<size_t, 4> widths = {0, 1, 1, 0};
  for (const Row &row : rows) {
    std::array<std::string, 4> cells = {row.title(), row.a, row.b, row.change};
    for (size_t i = 0; i < cells.size(); ++i)
      widths[i] = std::max(widths[i], widthOf(cells[i]));
  }
  std::string section;
  for (const Row &row : rows) {
    if (row.section != section) {
      os << (section.empty() ? "" : "\n");
      section = row.section;
      os << padded(section, widths[0] + 2, true) << "  "
         << padded("a", widths[1], false) << "  "
         << padded("b", widths[2], false) << '\n';
    }
    os << "  " << padded(row.title(), widths[0], true) << "  "
       << padded(row.a, widths[1], false) << "  "
       << padded(row.b, widths[2], false);
    if (!row.change.empty())
      os << "  " << padded(row.change, widths[3], false);
    os << '\n';
    for (auto [name, why] : {std::pair("a", row.whyA), {"b", row.whyB}})
      if (!why.empty())
        os << "      " << name << ": " << why << '\n';
  }
  return text;
}

} // namespace fsdp::simulate

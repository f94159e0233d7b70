//===- VerifyStreams.cpp - what streams and events must order -------------===//
//
// One pass with vector clocks (Mattern 1989): for each instruction and each
// stream, how many of the list are certainly complete before it begins. Streams
// are few, so a clock is small, and every question of order is one comparison.
//
//===----------------------------------------------------------------------===//
#include "../Analysis/StreamClock.h"
#include "Verifier.h"
#include "fsdp/Plan/Operands.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

namespace fsdp::plan {

namespace {

class StreamVerifier {
public:
  StreamVerifier(const Plan &plan, const std::vector<Instruction> &instructions,
                 const std::string &origin, const std::string &list)
      : plan(plan), instructions(instructions), origin(origin), list(list),
        onHost(plan.values.size()), storages(plan.values.size()),
        units(plan.units.size()) {
    for (const Instruction &instruction : instructions)
      if (const auto *offload =
              std::get_if<OffloadActivation>(&instruction.kind))
        onHost[offload->out] = true;
  }

  /// Of a step with microbatches: the first, two between, the last, so that
  /// any two that follow one another are seen.
  void run() {
    bool isStep = &instructions == &plan.instructions;
    int64_t rounds = isStep ? std::min<int64_t>(plan.accumulationSteps, 4) : 1;
    for (int64_t round = 0; round < rounds; ++round) {
      if (round > 0)
        beginMicrobatch();
      // The second of those between is like the first.
      play(round, round == rounds - 1 ? plan.accumulationSteps - 1 : round);
    }
  }

private:
  void play(int64_t round, int64_t microbatch) {
    for (size_t i = 0; i < instructions.size(); ++i) {
      const Instruction &instruction = instructions[i];
      position = round * count + int64_t(i);
      if (&instructions == &plan.instructions &&
          !runsIn(plan, instruction, microbatch)) {
        skip(instruction);
        continue;
      }
      begin(instruction);
      for (ValueId value : getOperands(instruction))
        read(value);
      for (ValueId value : getMutated(instruction))
        write(value, "written in place");
      visitUnit(instruction);
      for (ValueId value : getResults(instruction))
        define(value);
      finish(instruction);
    }
  }

  /// What did not end with a microbatch may be made again in the next one, or
  /// give its place to something else.
  void beginMicrobatch() {
    recorded.clear();
    for (size_t v = 0; v < storages.size(); ++v) {
      Accesses &accesses = storages[v];
      if (std::exchange(accesses.live, 0) <= 0)
        continue;
      accesses.stale = true;
      std::optional<Bytes> bytes = bytesOf(ValueId(v));
      if (!bytes)
        continue;
      Clock done = accesses.readers;
      if (accesses.writer != -1)
        join(done, after(accesses.writer));
      clear(*bytes);
      ended[bytes->begin] = {bytes->end, done};
    }
  }

  /// An instruction that the microbatch leaves out: its event is complete. The
  /// results of a gather are those that were kept.
  void skip(const Instruction &instruction) {
    if (instruction.records != -1)
      recorded.emplace(instruction.records, Clock{});
    if (std::holds_alternative<AllGather>(instruction.kind))
      for (ValueId value : getResults(instruction))
        ++accessesOf(value).live;
  }

  /// What has happened to a storage: who wrote it last, and who has read it
  /// since, the last on each stream.
  struct Accesses {
    int64_t writer = -1;
    Clock readers = {};
    /// Values of it that are defined and not freed.
    int32_t live = 0;
    /// Not freed by the microbatch before.
    bool stale = false;
  };
  struct UnitState {
    int64_t gather = -1, reshard = -1, copy = -1, stage = -1;
  };

  [[noreturn]] void fail(const char *label, const std::string &message) const {
    throw PlanError(origin + ": " + list + "[" +
                    std::to_string(position % count) + "]: " + message + " (" +
                    label + ")");
  }
  std::string at(int64_t other) const {
    return list + "[" + std::to_string(other % count) + "]" +
           (other / count < position / count ? " of the microbatch before"
                                             : "");
  }
  Stream streamAt(int64_t other) const {
    return instructions[size_t(other % count)].stream;
  }
  /// A clock at which the instruction at `other` is complete, and no more.
  Clock after(int64_t other) const {
    Clock clock = {};
    clock[size_t(streamAt(other))] = other + 1;
    return clock;
  }
  /// Whether the instruction at `other` is complete at `clock`.
  bool isComplete(int64_t other, const Clock &clock) const {
    return other < clock[size_t(streamAt(other))];
  }

  /// P26 and P27; sets `now`.
  void begin(const Instruction &instruction) {
    Stream own = ownStream(instruction);
    bool hasOwn = own != Stream::Compute;
    if (instruction.stream != Stream::Compute && own != instruction.stream)
      fail("P26", "expected the compute stream" +
                      (hasOwn ? " or stream " + quote(streamName(own)) : "") +
                      ", got " + quote(streamName(instruction.stream)));
    if (hasOwn) {
      auto [it, isFirst] =
          streamOf.try_emplace(instruction.kind.index(), instruction.stream);
      if (it->second != instruction.stream)
        fail("P26", "expected one stream for all instructions of a kind, got " +
                        quote(streamName(it->second)) + " and " +
                        quote(streamName(instruction.stream)));
    }
    now = clocks[size_t(instruction.stream)];
    for (EventId event : instruction.waits) {
      auto it = recorded.find(event);
      if (it == recorded.end())
        fail("P27", "expected event " + std::to_string(event) +
                        " to be recorded before, found no instruction that "
                        "records it");
      join(now, it->second);
    }
    if (instruction.stream != Stream::Compute && instruction.records == -1)
      fail("P27", "expected an instruction beside the compute stream to record "
                  "an event, it records none");
  }

  void finish(const Instruction &instruction) {
    Clock &end = clocks[size_t(instruction.stream)];
    end = now;
    end[size_t(instruction.stream)] = position + 1;
    if (instruction.records != -1 &&
        !recorded.emplace(instruction.records, end).second)
      fail("P27", "event " + std::to_string(instruction.records) +
                      " is recorded twice");
    for (ValueId value : instruction.frees)
      free(value, end);
  }

  Accesses &accessesOf(ValueId value) {
    ValueId owner = plan.values[value].storage;
    return storages[owner == -1 ? value : owner];
  }

  void read(ValueId value) {
    Accesses &accesses = accessesOf(value);
    if (accesses.writer != -1 && !isComplete(accesses.writer, now))
      fail("P28", "reads value " + std::to_string(value) + ", which " +
                      at(accesses.writer) +
                      " may not have written yet: no event orders them");
    accesses.readers[size_t(streamAt(position))] = position + 1;
  }

  /// Checks that everything that touched a storage is complete at `clock`,
  /// except for the instruction itself.
  void checkQuiet(const Accesses &accesses, ValueId value, const Clock &clock,
                  const std::string &done) const {
    auto check = [&](int64_t other, const char *what) {
      if (other >= 0 && other != position && !isComplete(other, clock))
        fail("P29", "value " + std::to_string(value) + " is " + done +
                        " while " + at(other) + " may still " + what + " it");
    };
    check(accesses.writer, "write");
    for (int64_t reader : accesses.readers)
      check(reader - 1, "read");
  }

  void write(ValueId value, const char *done) {
    Accesses &accesses = accessesOf(value);
    checkQuiet(accesses, value, now, done);
    accesses.writer = position;
    accesses.readers = {};
  }

  void define(ValueId value) {
    Accesses &accesses = accessesOf(value);
    ++accesses.live;
    const Value &entry = plan.values[value];
    if (entry.storage != -1) {
      // Of its operand's storage: a view, or the gradient of a lone rank.
      const auto &kind = instructions[size_t(position % count)].kind;
      const auto *unscale = std::get_if<Unscale>(&kind);
      if (std::holds_alternative<ClipGradNorm>(kind) ||
          (unscale && !unscale->deferred))
        write(value, "written in place");
      return;
    }
    if (std::exchange(accesses.stale, false))
      checkQuiet(accesses, value, now, "made again");
    accesses.writer = position;
    accesses.readers = {};
    if (std::optional<Bytes> bytes = bytesOf(value))
      occupy(value, *bytes);
  }

  void free(ValueId value, const Clock &end) {
    Accesses &accesses = accessesOf(value);
    // An instruction that was left out makes nothing to free.
    if (accesses.live == 0 || --accesses.live > 0)
      return;
    accesses.stale = false;
    checkQuiet(accesses, value, end, "freed");
    ValueId owner = plan.values[value].storage;
    std::optional<Bytes> bytes = bytesOf(owner == -1 ? value : owner);
    if (!bytes)
      return;
    // What was there before has been found complete when this began.
    clear(*bytes);
    ended[bytes->begin] = {bytes->end, after(position)};
  }

  /// Of the arenas; that of the host follows the device's.
  struct Bytes {
    int64_t begin, end;
  };
  /// nullopt where it has none.
  std::optional<Bytes> bytesOf(ValueId value) const {
    const Value &entry = plan.values[value];
    if (entry.offset == -1 || entry.numBytes() == 0)
      return std::nullopt;
    int64_t begin = entry.offset;
    if (onHost[value] && plan.arena)
      begin += plan.arena->bytes;
    return Bytes{begin, begin + entry.numBytes()};
  }

  /// Splits and drops what `ended` has in [begin, end).
  void clear(Bytes bytes) {
    auto [begin, end] = bytes;
    auto it = ended.lower_bound(begin);
    if (it != ended.begin() && std::prev(it)->second.end > begin)
      --it;
    while (it != ended.end() && it->first < end) {
      auto [from, interval] = *it;
      it = ended.erase(it);
      if (from < begin)
        ended[from] = {begin, interval.done};
      if (interval.end > end)
        it = std::next(ended.insert_or_assign(end, interval).first);
    }
  }

  /// Checks the bytes of a value whose life begins: what ended there must be
  /// complete.
  void occupy(ValueId value, Bytes bytes) const {
    auto [begin, end] = bytes;
    auto it = ended.lower_bound(begin);
    if (it != ended.begin() && std::prev(it)->second.end > begin)
      --it;
    for (; it != ended.end() && it->first < end; ++it)
      for (size_t s = 0; s < kNumStreams; ++s)
        if (int64_t other = it->second.done[s]; other > now[s])
          fail("P29", "value " + std::to_string(value) +
                          " takes bytes of the arena whose value " +
                          at(other - 1) +
                          " frees or uses last: no event orders them");
  }

  /// P30: a unit's parameters and its shards; P39: copies of these.
  void visitUnit(const Instruction &instruction) {
    auto expect = [&](int64_t other, const std::string &what,
                      const char *label = "P30") {
      if (other != -1 && !isComplete(other, now))
        fail(label, what + " before " + at(other) +
                        " is complete: no event orders them");
    };
    if (const auto *gather = std::get_if<AllGather>(&instruction.kind)) {
      UnitState &unit = units[gather->unit];
      expect(unit.reshard, "unit " + nameOf(gather->unit) + " is gathered");
      expect(unit.copy, "unit " + nameOf(gather->unit) + " is gathered");
      unit.gather = position;
    } else if (const auto *reshard = std::get_if<Reshard>(&instruction.kind)) {
      UnitState &unit = units[reshard->unit];
      expect(unit.gather, "unit " + nameOf(reshard->unit) + " is resharded");
      unit.reshard = position;
    } else if (const auto *copy =
                   std::get_if<CopyToDevice>(&instruction.kind)) {
      UnitState &unit = units[copy->unit];
      expect(unit.reshard, "unit " + nameOf(copy->unit) + " is copied");
      expect(unit.gather, "unit " + nameOf(copy->unit) + " is copied");
      unit.copy = position;
    } else if (const auto *stage = std::get_if<StageState>(&instruction.kind)) {
      units[stage->unit].stage = position;
    } else if (std::holds_alternative<OptimizerStep>(instruction.kind)) {
      for (size_t u = 0; u < units.size(); ++u) {
        std::string updated = "unit " + nameOf(int32_t(u)) + " is updated";
        expect(units[u].gather, updated);
        expect(units[u].copy, updated);
        expect(units[u].stage, updated, "P39");
      }
    }
  }
  std::string nameOf(int32_t unit) const {
    return quote(plan.units[size_t(unit)].name);
  }

  const Plan &plan;
  const std::vector<Instruction> &instructions;
  const std::string &origin;
  const std::string &list;
  const int64_t count = int64_t(instructions.size());
  /// Position in the list; for the n-th microbatch, n lists further on.
  int64_t position = 0;
  /// Before the current instruction begins; after the last of each stream.
  Clock now = {};
  std::array<Clock, kNumStreams> clocks = {};
  std::map<EventId, Clock> recorded;
  /// Per kind of collective and copy: the stream of all of them.
  std::map<size_t, Stream> streamOf;
  /// Per value: whether it is an offloaded activation on the host.
  std::vector<bool> onHost;
  /// Per value that has a storage of its own.
  std::vector<Accesses> storages;
  std::vector<UnitState> units;
  /// Bytes of the arena that were freed, or outlive a microbatch, by their
  /// first.
  struct Interval {
    int64_t end = 0;
    Clock done = {}; ///< when they are free
  };
  std::map<int64_t, Interval> ended;
};

} // namespace

void verifyStreams(const Plan &plan,
                   const std::vector<Instruction> &instructions,
                   const std::string &origin, const std::string &list) {
  StreamVerifier(plan, instructions, origin, list).run();
}

} // namespace fsdp::plan

//===- PlaceStorages.cpp - the layout of the arena ------------------------===//
//
// Greedy: the storages in some order, each where it leaves the least room in a
// gap between those placed before that are alive at some time with it, above
// all of them if it fits nowhere. The heaviest are placed so, in several
// orders. The others, of which a deep model has tens of thousands, are small
// or short-lived; they go into the gaps in the order in which they begin, with
// the gaps of the current position kept sorted, so that time stays
// near-linear.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Plan/DeviceBuffers.h"
#include "fsdp/Plan/Memory.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <queue>
#include <set>
#include <utility>

namespace fsdp::plan {

namespace {

/// Storages that are compared with all others.
constexpr size_t kHeaviest = 4096;
constexpr int64_t kNoEnd = std::numeric_limits<int64_t>::max() / 4;

int64_t lifetime(const Storage &storage) {
  int64_t length = 0;
  for (const Life &life : storage.lives)
    length += life.last - life.first + 1;
  return length;
}

/// Bytes [begin, end) taken during a life.
struct Taken {
  int64_t begin;
  int64_t end;
  Life life;
};

/// The smallest gap that `bytes` fit in, in [from, to), between parts that come
/// sorted by begin and may overlap each other.
class BestFit {
public:
  BestFit(int64_t bytes, int64_t from, int64_t to)
      : bytes(bytes), to(to), end(from) {}

  void pass(const Taken &taken) {
    look(std::min(taken.begin, to));
    end = std::max(end, taken.end);
  }
  /// Where the gap begins; -1 if there is none.
  int64_t finish() {
    look(to);
    return best;
  }

private:
  void look(int64_t next) {
    int64_t size = next - end;
    if (size >= bytes && size < room) {
      best = end;
      room = size;
    }
  }

  const int64_t bytes, to;
  int64_t end, best = -1, room = kNoEnd + 1;
};

class Placer {
public:
  /// `limit`: bytes that a placement must stay below to be of use.
  Placer(const Memory &memory, const std::vector<int32_t> &heavy,
         const std::vector<int32_t> &light, int64_t limit)
      : storages(memory.storages), heavy(heavy), light(light), limit(limit) {
    result.offsets.assign(storages.size(), -1);
  }

  /// Nullopt if it does not stay below the limit.
  std::optional<Placement> run() {
    for (int32_t index : heavy) {
      placeHeavy(index);
      if (result.bytes >= limit)
        return std::nullopt;
    }
    if (!light.empty())
      placeLight();
    if (result.bytes >= limit)
      return std::nullopt;
    return std::move(result);
  }

private:
  void assign(int32_t index, int64_t offset) {
    result.offsets[index] = offset;
    result.bytes = std::max(result.bytes, offset + storages[index].bytes);
  }

  void placeHeavy(int32_t index) {
    const Storage &storage = storages[index];
    BestFit fit(storage.bytes, 0, kNoEnd);
    for (const Taken &other : taken)
      if (std::any_of(
              storage.lives.begin(), storage.lives.end(),
              [&](const Life &life) { return life.overlaps(other.life); }))
        fit.pass(other);
    int64_t offset = fit.finish();
    assign(index, offset);
    for (const Life &life : storage.lives) {
      Taken own{offset, offset + storage.bytes, life};
      auto at = std::upper_bound(
          taken.begin(), taken.end(), own,
          [](const Taken &a, const Taken &b) { return a.begin < b.begin; });
      taken.insert(at, own);
    }
  }

  //===--------------------------------------------------------------------===//
  // The light ones: [begin, end) of what is free at the current position
  //===--------------------------------------------------------------------===//

  void addGap(int64_t begin, int64_t end) {
    gaps[begin] = end;
    gapsBySize.insert({end - begin, begin});
  }
  void removeGap(std::map<int64_t, int64_t>::iterator gap) {
    gapsBySize.erase({gap->second - gap->first, gap->first});
    gaps.erase(gap);
  }
  void take(int64_t begin, int64_t end) {
    auto gap = std::prev(gaps.upper_bound(begin));
    auto [from, to] = *gap;
    removeGap(gap);
    if (from < begin)
      addGap(from, begin);
    if (end < to)
      addGap(end, to);
  }
  void release(int64_t begin, int64_t end) {
    auto next = gaps.lower_bound(begin);
    if (next != gaps.begin())
      if (auto before = std::prev(next); before->second == begin) {
        begin = before->first;
        removeGap(before);
      }
    next = gaps.lower_bound(begin);
    if (next != gaps.end() && next->first == end) {
      end = next->second;
      removeGap(next);
    }
    addGap(begin, end);
  }

  void placeLight() {
    std::sort(taken.begin(), taken.end(), [](const Taken &a, const Taken &b) {
      return std::pair(a.life.first, a.begin) <
             std::pair(b.life.first, b.begin);
    });
    addGap(0, kNoEnd);
    // Ends of what is taken at the current position.
    auto later = [](const Taken &a, const Taken &b) {
      return std::pair(a.life.last, a.begin) > std::pair(b.life.last, b.begin);
    };
    std::priority_queue<Taken, std::vector<Taken>, decltype(later)> live(later);
    size_t begun = 0;
    auto moveTo = [&](int64_t position) {
      while (!live.empty() || begun < taken.size()) {
        bool begins =
            begun < taken.size() && taken[begun].life.first <= position &&
            (live.empty() || taken[begun].life.first <= live.top().life.last);
        if (begins) {
          take(taken[begun].begin, taken[begun].end);
          live.push(taken[begun++]);
        } else if (!live.empty() && live.top().life.last < position) {
          release(live.top().begin, live.top().end);
          live.pop();
        } else {
          break;
        }
      }
    };
    for (int32_t index : light) {
      const Storage &storage = storages[index];
      const Life &life = storage.lives.front();
      moveTo(life.first);
      // What will be taken during its life.
      busy.clear();
      for (size_t i = begun;
           i < taken.size() && taken[i].life.first <= life.last; ++i)
        busy.push_back(taken[i]);
      std::sort(busy.begin(), busy.end(), [](const Taken &a, const Taken &b) {
        return a.begin < b.begin;
      });
      int64_t offset = -1;
      for (auto gap = gapsBySize.lower_bound({storage.bytes, 0}); offset == -1;
           ++gap) {
        BestFit fit(storage.bytes, gap->second, gap->second + gap->first);
        for (const Taken &other : busy)
          fit.pass(other);
        offset = fit.finish();
      }
      assign(index, offset);
      Taken own{offset, offset + storage.bytes, life};
      take(own.begin, own.end);
      live.push(own);
    }
  }

  const std::vector<Storage> &storages;
  const std::vector<int32_t> &heavy, &light;
  const int64_t limit;
  Placement result;
  /// Placed heavy storages, by begin; by position once all are placed.
  std::vector<Taken> taken;
  std::vector<Taken> busy;
  std::map<int64_t, int64_t> gaps;
  std::set<std::pair<int64_t, int64_t>> gapsBySize;
};

} // namespace

Placement placeStorages(const Memory &memory) {
  const std::vector<Storage> &storages = memory.storages;
  int64_t lowerBound = 0;
  for (int64_t bytes : memory.liveBytes())
    lowerBound = std::max(lowerBound, bytes);

  std::vector<int32_t> all(storages.size());
  std::iota(all.begin(), all.end(), 0);
  auto sortBy = [&](std::vector<int32_t> &indices, auto key) {
    std::sort(indices.begin(), indices.end(), [&](int32_t a, int32_t b) {
      auto first = key(storages[a]), second = key(storages[b]);
      return first != second ? first > second : a < b;
    });
  };
  auto area = [](const Storage &s) { return double(s.bytes) * lifetime(s); };
  // An input lives twice.
  sortBy(all, [&](const Storage &s) {
    return std::pair(s.lives.size() > 1, area(s));
  });
  auto middle = std::find_if(
      all.begin() + long(std::min(kHeaviest, all.size())), all.end(),
      [&](int32_t i) { return storages[i].lives.size() == 1; });
  std::vector<int32_t> heavy(all.begin(), middle), light(middle, all.end());
  sortBy(light, [](const Storage &s) {
    return std::pair(-s.lives[0].first, s.bytes);
  });

  Placement best;
  auto attempt = [&](auto key) {
    if (!best.offsets.empty() && best.bytes == lowerBound)
      return;
    sortBy(heavy, key);
    int64_t limit =
        best.offsets.empty() ? std::numeric_limits<int64_t>::max() : best.bytes;
    if (auto placement = Placer(memory, heavy, light, limit).run())
      best = std::move(*placement);
  };
  attempt([](const Storage &s) { return std::pair(s.bytes, lifetime(s)); });
  attempt([](const Storage &s) { return std::pair(lifetime(s), s.bytes); });
  attempt(area);
  // Those that live at the peak first: nothing else may come between them.
  std::vector<int64_t> live = memory.liveBytes();
  int64_t peak = std::max_element(live.begin(), live.end()) - live.begin();
  attempt([&](const Storage &s) {
    bool atPeak =
        std::any_of(s.lives.begin(), s.lives.end(), [&](const Life &life) {
          return life.overlaps({peak, peak});
        });
    return std::tuple(atPeak, s.bytes, lifetime(s));
  });
  best.lowerBound = lowerBound;
  return best;
}

void layOutArena(Plan &plan, MemoryModel model) {
  if (model == MemoryModel::Device)
    addDeviceBuffers(plan);
  for (Value &value : plan.values)
    value.offset = -1;
  auto place = [&](const Memory &memory) -> Arena {
    Placement placement = placeStorages(memory);
    for (size_t v = 0; v < plan.values.size(); ++v)
      if (int32_t storage = memory.storageOf[v];
          storage != -1 && plan.values[v].storage == -1)
        plan.values[v].offset = placement.offsets[storage];
    return {placement.bytes, placement.lowerBound};
  };
  plan.arena = place(replayMemory(plan, model));
  plan.hostArena.reset();
  if (Memory host = replayHostMemory(plan); !host.storages.empty())
    plan.hostArena = place(host);
}

int64_t arenaAlign(const Plan &plan) {
  bool isForGpu = plan.capturedFor && plan.capturedFor->device == "cuda";
  return isForGpu ? 512 : kTensorAlign;
}

MemoryModel arenaModel(const Plan &plan) {
  for (const auto *program : {&plan.instructions, &plan.evaluation})
    for (const Instruction &instruction : *program)
      if (const auto *gather = std::get_if<AllGather>(&instruction.kind))
        for (ValueId out : gather->outs)
          if (out != -1 && plan.values[out].offset != -1)
            return MemoryModel::Device;
  return MemoryModel::SharedHost;
}

} // namespace fsdp::plan

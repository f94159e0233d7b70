//===- Rendezvous.cpp - how ranks find each other -------------------------===//
#include "fsdp/Runtime/Launch/Rendezvous.h"
#include "fsdp/Runtime/Collectives/ProcessIdentity.h"
#include "fsdp/Runtime/Collectives/RankBoard.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <regex>
#include <sstream>

#include <unistd.h>

namespace fsdp::runtime {

namespace {

std::string variableOr(const char *name, const char *otherwise) {
  const char *value = std::getenv(name);
  return value ? value : otherwise;
}

/// Marks a rank's error among texts that are not errors.
constexpr char kErrorMark = '!';

/// How long after the ranks have met another's rank may yet show itself.
constexpr auto kPatience = std::chrono::seconds(30);
constexpr auto kPause = std::chrono::milliseconds(100);

/// What a job shows to others: a line with a hash and a name for each part.
std::string showJob(const JobParts &job) {
  std::string shown;
  for (const auto &[name, text] : job)
    shown += hashBytes("shown " + name + "\n" + text) + " " + name + "\n";
  return shown;
}

/// The parts in which two jobs differ, by what they show.
std::string differences(const std::string &own, const std::string &other) {
  std::string names;
  std::istringstream ownLines(own), otherLines(other);
  for (std::string line, there; std::getline(ownLines, line);) {
    size_t name = line.find(' ');
    if (!std::getline(otherLines, there) || there.find(' ') != name ||
        there.substr(name) != line.substr(name))
      return "its program";
    if (line != there)
      names += (!names.empty() ? ", " : "") + line.substr(name + 1);
  }
  return names;
}

} // namespace

Rendezvous::Rendezvous(std::optional<RankEnvironment> environment,
                       const JobParts &job, std::chrono::milliseconds timeout)
    : timeout(timeout) {
  if (!environment)
    return;
  ignoreBrokenPipes();
  ownRank = environment->rank;
  ranks = environment->worldSize;
  c10d::TCPStoreOptions options;
  options.port = uint16_t(environment->masterPort);
  const char *shared = std::getenv("TORCHELASTIC_USE_AGENT_STORE");
  bool agentServes = shared && std::strcmp(shared, "True") == 0;
  options.isServer = ownRank == 0 && !agentServes;
  rankServes = !agentServes;
  options.waitWorkers = false;
  // torch.distributed may serve the same port in this process.
  options.multiTenant = true;
  options.timeout = timeout;
  place = environment->masterAddress + ":" +
          std::to_string(environment->masterPort);
  try {
    store = c10::make_intrusive<c10d::TCPStore>(environment->masterAddress,
                                                options);
    enter(job);
  } catch (const c10::Error &error) {
    std::string text = firstLine(error.what_without_backtrace());
    if (options.isServer && text.find("EADDRINUSE") != std::string::npos)
      throw RunError("cannot serve the ranks' store at " + place +
                     ": another program, or another job, is using the port");
    throw RunError("cannot connect to the ranks' store at " + place +
                   (rankServes ? ", which rank 0 serves: " : ": ") + text);
  }
}

Rendezvous::Rendezvous(const Rendezvous &all,
                       const std::vector<int64_t> &members)
    : ranks(int64_t(members.size())), members(members), timeout(all.timeout),
      place(all.place), store(all.store) {
  auto own = std::find(members.begin(), members.end(), all.ownRank);
  if (own == members.end())
    throw InputError("rank " + std::to_string(all.ownRank) +
                     " is not in its own group of ranks");
  ownRank = own - members.begin();
  rankServes = all.rankServes && members.front() == 0;
  keys = all.keys;
  for (int64_t member : members)
    keys += std::to_string(member) + ",";
  keys += "/";
}

std::string Rendezvous::numberedInJob(const std::string &message) const {
  if (members.empty())
    return message;
  static const std::regex named("\\branks? [0-9]+(, [0-9]+| and [0-9]+)*"),
      number("[0-9]+");
  auto replaced = [](const std::string &text, const std::regex &pattern,
                     auto replacement) {
    std::string result;
    auto rest = text.begin();
    for (std::sregex_iterator it(text.begin(), text.end(), pattern), end;
         it != end; ++it) {
      result.append(rest, (*it)[0].first);
      result += replacement(it->str());
      rest = (*it)[0].second;
    }
    return result.append(rest, text.end());
  };
  return replaced(message, named, [&](const std::string &ranks) {
    return replaced(ranks, number, [&](const std::string &digits) {
      size_t rank = std::stoul(digits);
      return rank < members.size() ? std::to_string(members[rank]) : digits;
    });
  });
}

void Rendezvous::enter(JobParts job) {
  std::string attempt =
      "fsdp-run/" + variableOr("TORCHELASTIC_RESTART_COUNT", "0") + "/";
  job.emplace_back("run id", variableOr("TORCHELASTIC_RUN_ID", ""));
  std::string all;
  for (const auto &[name, text] : job)
    all += name + "\n" + text + "\n";
  std::string secret = hashBytes(all), shown = showJob(job);
  std::string found;
  if (ownRank == 0)
    found = store->compareSet(attempt + "job", "", shown);
  else if (waitFor(attempt + "job", std::chrono::steady_clock::now() + timeout))
    found = store->get_to_str(attempt + "job");
  else
    throw RunError("rank 0 has not come to " + place + " in " +
                   std::to_string(timeout.count() / 1000) + " s");
  if (found != shown)
    throw RunError("another job is at " + place +
                   ", which differs from this rank's in " +
                   differences(shown, found));
  keys = attempt + secret + "/";
  std::string own = processIdentity(getpid());
  if (store->compareSet(keys + "rank " + std::to_string(ownRank), "", own) ==
      own)
    return;
  store->set(keys + "twice", std::to_string(ownRank));
  confirm();
}

std::optional<std::string> Rendezvous::takenTwice() {
  if (!store || !store->check({keys + "twice"}))
    return std::nullopt;
  return "two processes are rank " + store->get_to_str(keys + "twice") +
         " at " + place + ": do two jobs use one port?";
}

void Rendezvous::confirm() {
  if (std::optional<std::string> twice = takenTwice())
    throw RunError(*twice);
}

void Rendezvous::watchPlaces(std::function<void(const std::string &)> onTwice) {
  if (!store)
    return;
  watcher = std::thread([this, onTwice = std::move(onTwice)] {
    auto end = std::chrono::steady_clock::now() + kPatience;
    try {
      for (; !stop && std::chrono::steady_clock::now() < end;
           std::this_thread::sleep_for(kPause))
        confirm();
      if (stop)
        confirm();
    } catch (const RunError &error) {
      onTwice(error.what());
    } catch (const std::exception &) {
      // Whoever serves the store has ended; the ranks see that themselves.
    }
  });
}

std::string Rendezvous::nextKey() {
  // Over all objects of the same ranks in a process, which has them in the same
  // order as others.
  static std::map<std::string, int64_t> exchanges;
  return keys + std::to_string(exchanges[keys]++) + "/";
}

Rendezvous::~Rendezvous() {
  stop = true;
  if (watcher.joinable())
    watcher.join();
}

bool Rendezvous::waitFor(const std::string &key,
                         std::chrono::steady_clock::time_point end) {
  // This does not use the store's wait, whose error does not say what is
  // missing.
  for (auto pause = std::chrono::milliseconds(1); !store->check({key});
       pause = std::min(2 * pause, kPause)) {
    if (std::chrono::steady_clock::now() > end)
      return false;
    // A rank that is waited for may have ended because of this.
    if (pause == kPause)
      confirm();
    std::this_thread::sleep_for(pause);
  }
  return true;
}

std::vector<std::string>
Rendezvous::exchange(const std::string &own,
                     std::optional<std::chrono::milliseconds> given) {
  if (!store)
    return {own};
  std::string key = nextKey();
  std::vector<std::string> texts;
  std::chrono::milliseconds patience = given.value_or(timeout);
  auto end = std::chrono::steady_clock::now() + patience;
  try {
    store->set(key + std::to_string(ownRank), own);
    std::vector<int64_t> missing;
    for (int64_t rank = 0; rank < ranks; ++rank)
      if (waitFor(key + std::to_string(rank), end))
        texts.push_back(store->get_to_str(key + std::to_string(rank)));
      else
        missing.push_back(rank);
    if (!missing.empty())
      throw RunError(
          "the ranks did not find each other: " + nameRanks(missing) +
          (missing.size() == 1 ? " has" : " have") + " not come in " +
          std::to_string(patience.count() / 1000) + " s");
    // Rank 0 may serve the store: it stays until everybody has asked for all
    // that it wants, and may end the moment the last one has said so.
    std::optional<std::string> twice = takenTwice();
    if (store->add(key + "read", 1) == ranks)
      store->set(key + "done", "1");
    if (ownRank == 0)
      waitFor(key + "done", end);
    if (twice)
      throw RunError(*twice);
  } catch (const c10::Error &error) {
    throw RunError("the ranks did not find each other: " +
                   std::string(error.what_without_backtrace()));
  }
  return texts;
}

std::optional<int64_t> Rendezvous::rankElsewhere() {
  if (hosts.empty())
    hosts = exchange(hostIdentity());
  for (size_t rank = 1; rank < hosts.size(); ++rank)
    if (hosts[rank] != hosts[0])
      return int64_t(rank);
  return std::nullopt;
}

c10::intrusive_ptr<c10d::Store> Rendezvous::connectStore() {
  if (!store)
    return c10::make_intrusive<c10d::HashStore>();
  try {
    return c10::make_intrusive<c10d::PrefixStore>(nextKey() + "store",
                                                  store->clone());
  } catch (const c10::Error &error) {
    throw RunError("the ranks' store failed: " +
                   std::string(error.what_without_backtrace()));
  }
}

void shareMemory(Rendezvous &rendezvous, const std::function<int()> &create,
                 const std::function<void(const std::string &)> &open) {
  if (std::optional<int64_t> rank = rendezvous.rankElsewhere())
    throw InputError("expected all ranks on one host, got rank " +
                     std::to_string(*rank) + " on another than rank 0");
  auto agree = [&](auto make) {
    std::string own;
    try {
      own = make();
    } catch (const std::exception &error) {
      own = kErrorMark + std::string(error.what());
    }
    std::vector<std::string> texts = rendezvous.exchange(own);
    for (size_t rank = 0; rank < texts.size(); ++rank)
      if (texts[rank].starts_with(kErrorMark))
        throw RunError("rank " + std::to_string(rank) + ": " +
                       texts[rank].substr(1));
    return texts[0];
  };
  std::string path = agree([&]() -> std::string {
    if (rendezvous.rank() != 0)
      return "";
    return "/proc/" + std::to_string(getpid()) + "/fd/" +
           std::to_string(create());
  });
  // The others reach the memory through rank 0's process: it waits for them.
  agree([&]() -> std::string {
    if (rendezvous.rank() != 0)
      open(path);
    return "";
  });
}

std::unique_ptr<ShmSegment> shareSegment(const plan::Plan &plan,
                                         Rendezvous &rendezvous) {
  std::unique_ptr<ShmSegment> segment;
  shareMemory(
      rendezvous,
      [&] {
        segment = std::make_unique<ShmSegment>(plan);
        return segment->fd();
      },
      [&](const std::string &path) {
        segment = std::make_unique<ShmSegment>(plan, path);
      });
  return segment;
}

} // namespace fsdp::runtime

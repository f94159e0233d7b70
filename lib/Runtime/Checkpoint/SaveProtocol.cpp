//===- SaveProtocol.cpp - how the ranks save a checkpoint -----------------===//
#include "fsdp/Runtime/Checkpoint/SaveProtocol.h"
#include "fsdp/Runtime/Checkpoint/NativeCheckpoint.h"
#include "fsdp/Runtime/Files/SafeTensors.h"

#include <map>
#include <utility>

#include <unistd.h>

namespace fsdp::runtime {

using nlohmann::json;

namespace {

std::string_view textOf(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char *>(bytes.data()), bytes.size()};
}

/// Paths may have any bytes.
std::string print(const json &message) {
  return message.dump(-1, ' ', false, json::error_handler_t::replace);
}

/// A message: why a rank fails.
json failure(int64_t rank, const std::string &message) {
  return {{"error", message}, {"rank", rank}};
}

[[noreturn]] void throwFailure(const json &message) {
  throw SaveError(message.at("rank").get<int64_t>(),
                  message.at("error").get<std::string>());
}

/// One rank's part in one save.
class Save {
public:
  Save(const SaveRequest &request, CheckpointFolder &folder, int64_t keep,
       Channel &channel, Progress &progress, size_t pieceBytes)
      : request(request), folder(folder), keep(keep), channel(channel),
        progress(progress), pieceBytes(pieceBytes) {}

  SaveResult run() {
    progress.begin(request.state.step);
    try {
      agree();
      write();
      finish();
    } catch (...) {
      removeOwn();
      progress.end();
      throw;
    }
    retire();
    progress.end();
    return std::move(result);
  }

private:
  bool leads() const { return channel.rank() == 0; }

  /// What `make` gives on rank 0 for all ranks' messages, or why it or another
  /// rank failed. Each rank's message is that of `own`.
  template <typename OwnT, typename MakeT> json decide(OwnT own, MakeT make) {
    json message;
    try {
      message = own();
    } catch (const AbortedError &) {
      throw;
    } catch (const std::exception &error) {
      message = failure(channel.rank(), error.what());
    }
    std::vector<std::string> texts;
    json verdict;
    try {
      texts = channel.gather(print(message));
      if (leads())
        verdict = judge(texts, make);
    } catch (const AbortedError &) {
      throw;
    } catch (const std::exception &error) {
      verdict = failure(channel.rank(), error.what());
    }
    if (leads() && verdict.contains("error"))
      folder.abandon(attempt);
    progress.reach(SavePoint::Acknowledge);
    verdict = json::parse(channel.broadcast(print(verdict)));
    if (verdict.contains("error"))
      throwFailure(verdict);
    return verdict;
  }

  template <typename MakeT>
  json judge(const std::vector<std::string> &texts, MakeT make) {
    std::vector<json> messages;
    for (const std::string &text : texts) {
      messages.push_back(json::parse(text));
      if (messages.back().contains("error"))
        return messages.back();
    }
    return make(messages);
  }

  void agree() {
    const RunState &state = request.state;
    json verdict = decide(
        [&]() -> json {
          progress.reach(SavePoint::Agree);
          // Names and places of a chunk, generously.
          uint64_t bytes = 4096;
          for (const auto *list : {&request.chunks, &request.own})
            for (const ShardTensor &tensor : *list)
              bytes += tensor.data.size() + 512;
          return {{"what", state.plan + " " + std::to_string(state.step) + " " +
                               std::to_string(state.samples)},
                  {"bytes", bytes}};
        },
        [&](const std::vector<json> &messages) -> json {
          uint64_t bytes = 0;
          for (size_t rank = 0; rank < messages.size(); ++rank) {
            if (messages[rank].at("what") != messages[0].at("what"))
              throw RunError("rank " + std::to_string(rank) +
                             " saves a different plan or step than rank 0");
            bytes += messages[rank].at("bytes").get<uint64_t>();
          }
          progress.reach(SavePoint::Create);
          attempt = newAttempt();
          folder.begin(attempt, bytes);
          return {{"attempt", attempt}, {"own", digestsOfOwn()}};
        });
    attempt = verdict.at("attempt").get<std::string>();
    ofFirst = verdict.at("own").get<std::map<std::string, std::string>>();
  }

  /// Of a rank's own tensor: equal tensors have equal texts.
  static std::string digest(const ShardTensor &tensor) {
    return hashBytes(textOf(tensor.data)) + " " + describe(tensor.spec);
  }

  std::map<std::string, std::string> digestsOfOwn() const {
    std::map<std::string, std::string> digests;
    for (const ShardTensor &tensor : request.own)
      digests[tensor.name] = digest(tensor);
    return digests;
  }

  /// The tensors of this rank's file.
  std::vector<ShardTensor> contents() const {
    std::vector<ShardTensor> tensors = request.chunks;
    for (ShardTensor tensor : request.own) {
      if (!leads()) {
        // The ranks need not have the same ones: an expert of which one of
        // them has a gradient has state there alone.
        auto first = ofFirst.find(tensor.name);
        if (first != ofFirst.end() && first->second == digest(tensor))
          continue;
        tensor.name = ownName(channel.rank(), tensor.name);
      }
      tensors.push_back(std::move(tensor));
    }
    return tensors;
  }

  void write() {
    json verdict = decide(
        [&]() -> json {
          std::vector<ShardTensor> tensors = contents();
          DurableFile::Options options;
          options.pieceBytes = pieceBytes;
          options.check = [&] { channel.check(); };
          Manifest own;
          own.files = {writeShardFile(folder.inFlight(attempt), channel.rank(),
                                      attempt, tensors, progress, options)};
          for (const ShardTensor &tensor : tensors)
            own.tensors[tensor.name] = tensor.spec;
          progress.reach(SavePoint::Report);
          // From here on the file is rank 0's to remove, which may commit it
          // even if this rank hears no more of that.
          if (!leads())
            attempt.clear();
          return {{"manifest", printManifest(own)}};
        },
        [&](const std::vector<json> &messages) -> json {
          uint64_t bytes = commit(messages);
          return {{"bytes", bytes}};
        });
    result.bytes = verdict.at("bytes").get<uint64_t>();
  }

  uint64_t commit(const std::vector<json> &messages) {
    Manifest manifest;
    manifest.attempt = attempt;
    manifest.state = request.state;
    manifest.aliases = request.aliases;
    uint64_t bytes = 0;
    for (size_t rank = 0; rank < messages.size(); ++rank) {
      Manifest one =
          parseManifest(messages[rank].at("manifest").get<std::string>(),
                        "rank " + std::to_string(rank));
      for (const auto &[name, spec] : one.tensors)
        if (!manifest.tensors.emplace(name, spec).second &&
            manifest.tensors[name] != spec)
          throw RunError("rank " + std::to_string(rank) +
                         " saves a different \"" + name +
                         "\" than the other ranks");
      bytes += one.files.at(0).bytes;
      manifest.files.push_back(std::move(one.files.at(0)));
    }
    std::string place = folder.inFlight(attempt);
    progress.reach(SavePoint::WriteManifest);
    DurableFile::Options options;
    options.write = SavePoint::WriteManifest;
    options.sync = SavePoint::SyncManifest;
    DurableFile file(place + "/" + kManifestName, progress, options);
    file.write(printManifest(manifest));
    file.finish();
    progress.reach(SavePoint::SyncFolder);
    syncFolder(place);
    folder.commit(attempt, request.state.step, progress);
    return bytes;
  }

  void finish() { attempt.clear(); }

  /// After a failure; rank 0 removes the folder.
  void removeOwn() {
    if (attempt.empty())
      return;
    if (leads())
      folder.abandon(attempt);
    else
      unlink((folder.inFlight(attempt) + "/" + shardFileName(channel.rank()))
                 .c_str());
  }

  void retire() {
    if (!leads() || keep == 0)
      return;
    try {
      folder.retire(keep, request.state.step, progress);
    } catch (const std::exception &error) {
      result.warning = error.what();
    }
  }

  const SaveRequest &request;
  CheckpointFolder &folder;
  int64_t keep;
  Channel &channel;
  Progress &progress;
  size_t pieceBytes;
  std::string attempt; ///< empty where this rank has nothing in the folder
  std::map<std::string, std::string> ofFirst; ///< rank 0's own, by name
  SaveResult result;
};

} // namespace

SaveResult saveCheckpoint(const SaveRequest &request, CheckpointFolder &folder,
                          int64_t keep, Channel &channel, Progress &progress,
                          size_t pieceBytes) {
  return Save(request, folder, keep, channel, progress, pieceBytes).run();
}

} // namespace fsdp::runtime

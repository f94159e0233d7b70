//===- SavePoint.h - how far a checkpoint is ------------------------------===//
#ifndef FSDP_RUNTIME_SAVEPOINT_H
#define FSDP_RUNTIME_SAVEPOINT_H

#include <array>
#include <cstdint>
#include <string_view>

namespace fsdp::runtime {

/// What a rank is about to do for a checkpoint, in this order. Only rank 0 does
/// those from Create to Remove, except Open, Write, SyncFile and Report.
enum class SavePoint : uint8_t {
  None,
  Stage,  ///< copies what it saves
  Agree,  ///< meets the others
  Create, ///< makes the folder of the save
  Open,   ///< its file
  Write,  ///< a piece of it
  SyncFile,
  Report, ///< tells rank 0 what it wrote
  WriteManifest,
  SyncManifest,
  SyncFolder,
  Commit, ///< gives the folder its name
  SyncParent,
  Acknowledge, ///< tells the others
  Retire,      ///< takes the name of an old checkpoint
  Remove,      ///< a file of that
  Choose,      ///< a checkpoint to go on from
  Verify,      ///< its share of the files
  Read,        ///< its part of the state
};

/// Names in the order of the enumerators, as the hidden option
/// --checkpoint-fault takes them.
inline constexpr std::array<std::string_view, 19> kSavePoints = {
    "none",        "stage",     "agree",       "create",      "open",
    "write",       "sync-file", "report",      "manifest",    "sync-manifest",
    "sync-folder", "commit",    "sync-parent", "acknowledge", "retire",
    "remove",      "choose",    "verify",      "read"};

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_SAVEPOINT_H

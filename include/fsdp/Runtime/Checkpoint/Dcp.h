//===- Dcp.h - checkpoints of torch.distributed.checkpoint ----------------===//
//
// A folder of files `__{rank}_{n}.distcp`, each one item of torch.save behind
// the other, and `.metadata`, a pickle that says which items there are, written
// last. PyTorch writes no checksum of `.metadata`, and compares none of an
// item's; here every item's CRC-32 is compared, and `.metadata` gets a hash
// (DcpMetadata.h).
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_RUNTIME_CHECKPOINT_DCP_H
#define FSDP_RUNTIME_CHECKPOINT_DCP_H

#include "fsdp/Runtime/Checkpoint/Chunks.h"
#include "fsdp/Runtime/Checkpoint/DcpMetadata.h"

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// Whether the folder has a file of such a checkpoint.
bool isDcp(const std::string &folder);

/// Reads a checkpoint, and every byte of it: chunks tile their tensors, items
/// fill their files, and no file of the folder is of another checkpoint. Throws
/// InputError that names what is not so.
SavedState readDcp(const std::string &folder);

// Writing. Names are taken as they are. Arrays of the optimizer's options
// ("param_groups.") become tuples, others lists. All throw RunError, and
// InputError if the folder cannot be written.

/// Writes one rank's part to `folder`/__{rank}_0.distcp, and returns what it
/// is. Of chunks without elements only those of tensors without any are
/// written.
DcpMetadata writeDcpPart(const std::string &folder, int64_t rank,
                         const SavedState &part);

/// Makes a checkpoint of the parts of all ranks, which have been written to the
/// folder. Each value is in one part, and the chunks of all tile each tensor,
/// or it throws InputError.
void finishDcp(const std::string &folder,
               const std::vector<DcpMetadata> &parts);

/// Writes all of it as one part, to a folder that is new or empty.
void writeDcp(const std::string &folder, const SavedState &state);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_DCP_H

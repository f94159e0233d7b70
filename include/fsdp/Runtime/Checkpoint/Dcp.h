//===- Dcp.h - checkpoints of torch.distributed.checkpoint ----------------===//
//
// A folder of files `__{rank}_{n}.distcp`, each a sequence of torch.save items,
// and `.metadata`, a pickle that lists the items and is written last. PyTorch
// writes no checksum for `.metadata`, and does not check those of items; here
// every item's CRC-32 is checked, and `.metadata` gets a hash (DcpMetadata.h).
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

/// Reads a checkpoint, and every byte of it: chunks must tile their tensors,
/// items must fill their files, and no file in the folder may belong to another
/// checkpoint. Throws InputError, which names what is wrong.
SavedState readDcp(const std::string &folder);

// Writing. Names are taken as they are. Arrays of the optimizer's options
// ("param_groups.") become tuples, others lists. All throw RunError, and
// InputError if the folder cannot be written.

/// Writes one rank's part to `folder`/__{rank}_0.distcp, and returns its
/// metadata. Chunks without elements are written only for tensors without
/// elements.
DcpMetadata writeDcpPart(const std::string &folder, int64_t rank,
                         const SavedState &part);

/// Makes a checkpoint of the parts of all ranks, which have been written to the
/// folder. Throws InputError unless each value is in exactly one part and the
/// chunks of all parts tile each tensor.
void finishDcp(const std::string &folder,
               const std::vector<DcpMetadata> &parts);

/// Writes all of it as one part, to a folder that is new or empty.
void writeDcp(const std::string &folder, const SavedState &state);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_CHECKPOINT_DCP_H

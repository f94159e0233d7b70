//===- RankEnvironment.h - what a launcher says to the rank it started ----===//
#ifndef FSDP_RUNTIME_LAUNCH_RANKENVIRONMENT_H
#define FSDP_RUNTIME_LAUNCH_RANKENVIRONMENT_H

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::runtime {

/// Which rank this process is, and where the ranks' store is.
struct RankEnvironment {
  int64_t rank = 0;
  int64_t worldSize = 1;
  std::string masterAddress;
  int masterPort = 0;
  int64_t localRank = 0;
  const char *sizeVariable = "WORLD_SIZE"; ///< for messages
};

/// Reads what one of these launchers sets, the innermost first:
///
///   torchrun     RANK, WORLD_SIZE, LOCAL_RANK (0 where it is not set)
///   Open MPI     OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK
///   MPICH, PMI   PMI_RANK, PMI_SIZE, MPI_LOCALRANKID
///   Slurm's srun SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID
///
/// and MASTER_ADDR and MASTER_PORT, which torchrun sets. Without them the store
/// is on the first host of SLURM_STEP_NODELIST, or on this host if all ranks
/// are on it, at a port derived from the job's id; rank 0 serves it there.
/// nullopt if no launcher set anything. Throws InputError if something is
/// missing or malformed, or if Open MPI's rank, or a RANK that torchrun did not
/// set, differs from the rank of the launcher behind it.
std::optional<RankEnvironment> rankEnvironment();

/// The first host of a list as Slurm writes them: "gpu03" of
/// "gpu[03-05,07],login1". Empty if `hosts` is not such a list.
std::string firstHost(const std::string &hosts);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_RANKENVIRONMENT_H

//===- RunFiles.h - what a run is told, reads and writes ------------------===//
#ifndef FSDP_RUNTIME_LAUNCH_RUNFILES_H
#define FSDP_RUNTIME_LAUNCH_RUNFILES_H

#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Checkpoint/DurableFile.h"
#include "fsdp/Runtime/Checkpoint/Progress.h"
#include "fsdp/Runtime/Collectives/Backend.h"
#include "fsdp/Runtime/Execution/Executor.h"
#include "fsdp/Runtime/Files/OpenData.h"
#include "fsdp/Runtime/Files/SafeTensors.h"
#include "fsdp/Runtime/Files/WeightFiles.h"
#include "fsdp/Runtime/Launch/StoreChannel.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::runtime {

/// What the command line says.
struct RunOptions {
  std::string planPath;
  /// The library of the plan's plug-in optimizer that is allowed to run; empty:
  /// none.
  std::string allowedPlugin;
  /// Libraries of operators that the plan may call.
  std::vector<std::string> operatorLibraries;
  int64_t steps = 1;
  DataOptions data;
  uint64_t seed = 0;
  /// The seed of the model's own initialisation; by default, `seed`.
  std::optional<uint64_t> initSeed;
  std::string metricsPath;       ///< empty: none
  std::string tensorboardFolder; ///< empty: no events
  /// ReportSettings::peakFlops.
  std::optional<double> peakFlops;
  /// Whether the run fails at the first number that is not finite.
  bool haltsOnNotFinite = false;
  std::string profilePath;    ///< empty: no profile
  std::string tracePath;      ///< of the last step; empty: none
  std::string weightsPath;    ///< empty: the plan's
  std::string weightsHash;    ///< that `weightsPath` must have; empty: any
  std::string dataHash;       ///< that the file of `data` must have
  std::string outWeightsPath; ///< --save-weights; empty: none
  int threads = 1;
  std::string device = "cpu"; ///< makeDevice
  /// Run a plan that was captured for another device.
  bool anyDevice = false;
  Backend backend = Backend::Shm;
  bool graphs = false; ///< Executor::useGraphs
  /// StreamSettings::maxDelayMicroseconds.
  std::optional<int64_t> maxStreamDelay;
  int64_t evalEvery = 0;   ///< steps from one evaluation to the next; 0: none
  int64_t evalBatches = 0; ///< of each rank; 0: as many as the data fills
  /// Of evaluations; empty: what `data` holds out, or synthetic data.
  std::vector<std::string> evalSources;
  std::optional<Fault> fault;
  /// The deadline of Patience; nullopt: the default.
  std::optional<std::chrono::milliseconds> deadline;
  /// Seconds after `begun` by which the run must have stopped.
  std::optional<double> timeLimit;
  std::chrono::steady_clock::time_point begun =
      std::chrono::steady_clock::now();
  std::string checkpointPath;   ///< --checkpoint; empty: none are saved
  int64_t checkpointEvery = 0;  ///< steps; 0: after the last alone
  int64_t keep = 0;             ///< checkpoints; 0: all
  bool checkpointAsync = false; ///< written during the next steps
  std::string resume;           ///< "auto", a checkpoint, or empty
  std::optional<SaveFault> saveFault;
  size_t checkpointPiece = DurableFile::kPiece;
  std::chrono::seconds checkpointPatience = kChannelPatience;

  bool hasCheckpoints() const {
    return !checkpointPath.empty() || !resume.empty();
  }
};

/// Throws InputError if --profile or --trace needs more steps than a run that
/// begins after step `begin` has.
void checkMeasuring(const RunOptions &options, int64_t begin);

/// Leaves out the paths of libraries, which differ between hosts.
std::string hashOfPlan(plan::Plan plan);

/// Everything that a run reads, and everything that it writes at its end,
/// opened and checked before any rank begins.
struct RunFiles {
  /// Throws InputError or plan::PlanError. Loads the libraries of operators,
  /// which forked ranks then inherit. One process of a run is its `first`: it
  /// owns the output files.
  RunFiles(const RunOptions &options, bool first);

  /// Compares the weights and the data with the hashes that the plan, the
  /// options and the files themselves state, which reads whole files. Throws
  /// InputError.
  void checkHashes(const RunOptions &options) const;
  /// What checkHashes() reads.
  struct Reading {
    std::string identity; ///< says which files of this host
    int64_t bytes = 0;
  };
  Reading hashed() const;

  plan::Plan plan;
  /// Set for runs with checkpoints: the hash of the plan as it was read.
  std::string planHash;
  /// The weights come from a checkpoint: no weights are read here, and nothing
  /// is initialised.
  bool resumes = false;
  /// Empty where neither plan nor options name a file: the plan has an
  /// initialisation then.
  std::optional<WeightFiles> weights;
  /// The plan's own weights, if `weights` are others that lack some buffer.
  std::optional<WeightFiles> capturedWeights;
  /// Whether to run the plan's initialisation, before any weights are read.
  bool initialises = false;
  /// The data that is trained on, and evaluated; the latter is null without
  /// evaluations.
  std::unique_ptr<DataSource> data, evalData;
  /// Null if nothing is to be written, or if another process has the file. Rank
  /// 0 commits them.
  std::unique_ptr<OutputFile> outWeights, profile, trace;
  /// Batches that each rank evaluates at a time.
  int64_t evalBatches = 1;

private:
  void openWeights(const RunOptions &options);
  void openData(const RunOptions &options);
  void openEvaluation(const RunOptions &options);
  void checkOutputs(const RunOptions &options) const;
  void openOutputs(const RunOptions &options);
};

/// Says on stderr why the kernels' code cannot run on `target`
/// (KernelTable.h), if it cannot and should.
void warnOfKernelCode(const plan::Plan &plan, const std::string &path,
                      const std::string &target);

} // namespace fsdp::runtime

#endif // FSDP_RUNTIME_LAUNCH_RUNFILES_H

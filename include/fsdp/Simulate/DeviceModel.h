//===- DeviceModel.h - what a device and its links can do -----------------===//
//
// The description that the cost model computes with: a YAML file that a user
// can write (docs/simulate.md). The types use only the standard library and
// fsdp/Plan; LLVM reads the YAML.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_SIMULATE_DEVICEMODEL_H
#define FSDP_SIMULATE_DEVICEMODEL_H

#include "fsdp/Plan/Memory.h"
#include "fsdp/Plan/ModelCollectives.h"
#include "fsdp/Plan/Plan.h"

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::simulate {

/// Bad input: one line that begins with file:line:column if there is a
/// position.
struct SimulateError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Link {
  double latency = 0;   ///< seconds a hop
  double bandwidth = 0; ///< bytes a second, of one rank in one direction
};

/// One rank's device, and how it reaches the others. Ranks are placed on hosts
/// in order, `ranksPerHost` on each.
struct DeviceModel {
  std::string name;
  /// FLOP/s of matrix products by dtype; float32 is always there. A dtype that
  /// is not there has float32's value.
  std::map<plan::DType, double> peakFlops;
  /// The fractions of the peak that matrix products and attention reach.
  double matmulFraction = 1;
  double attentionFraction = 1;
  /// Bytes per second, and the fraction of it that operators reach.
  double memoryBandwidth = 0;
  double memoryFraction = 1;
  /// Seconds that every operator takes in addition.
  double opOverhead = 0;
  int64_t memoryCapacity = 0; ///< bytes a rank; 0: not known
  int64_t ranksPerHost = 1;
  /// Seconds that a collective takes in addition to its hops.
  double collectiveLatency = 0;
  Link withinHost;
  Link betweenHosts;
  /// Between the device and the host's memory.
  Link hostLink;
  /// How much longer compute takes while a collective runs beside it.
  double collectiveSlowdown = 1;
  /// The ranks of a host share its memory: gathered parameters are views of
  /// what the owners wrote, and reductions read the peers' gradients in place.
  bool sharedMemory = false;
  /// One thread runs all streams of a rank, in the order of the plan.
  bool serialStreams = false;
  /// Collectives use flat buffers: FSDP2 copies gathered parameters out of them
  /// and gradients into them.
  bool collectiveCopies = false;
  /// Chains of pointwise operators and reductions are one kernel, as
  /// torch.compile makes them.
  bool fusePointwise = false;

  double peak(plan::DType dtype) const;
  /// SharedHost with sharedMemory.
  plan::MemoryModel memoryModel() const {
    return sharedMemory ? plan::MemoryModel::SharedHost
                        : plan::MemoryModel::Device;
  }
};

/// Ranks of one process group: `ranks` of them, `stride` apart.
struct Axis {
  int64_t ranks = 1;
  int64_t stride = 1;
};

/// The ranks of `plan` that hold the shards of a parameter, or `group`
/// neighbours of them.
Axis shardAxis(const plan::Plan &plan, int64_t group = 0);
/// HSDP's replicas.
Axis replicateAxis(const plan::Plan &plan);

using Collective = plan::CollectiveKind;

/// What a transfer occupies: transfers over one medium share its bandwidth.
enum class Medium : uint8_t { None, WithinHost, BetweenHosts, HostLink };

struct Transfer {
  double seconds = 0;
  Medium medium = Medium::None;
};

/// A ring over the axis, like NCCL's: each of the n ranks receives (n-1)/n of
/// `bytes`, the whole padded buffer, and twice that in an all-reduce. Within a
/// host the bytes come over its link; between h hosts with m ranks each,
/// (h-1)/h of `bytes` come over the m links of a host. The slower of the two
/// counts, plus the latency of each of the n-1 hops (NCCL's tuning.cc has the
/// same model). With sharedMemory, inside one host, a gather takes only its
/// latency, and a reduction reads `bytes`, or the shards of all replicas, from
/// memory.
///
/// In an all-to-all each rank has `bytes`, an equal part for each, and sends
/// them at once: what stays on the host over its link, the rest over the rank's
/// own link to others. A send of `bytes` goes over one link: within the host if
/// the axis stays on it. Both take the latency of one hop.
Transfer transferTime(const DeviceModel &device, Collective collective,
                      Axis axis, double bytes);

/// Hosts that the axis reaches.
int64_t hostsOf(const DeviceModel &device, Axis axis);

/// Reads a description; `path` is for messages. Throws SimulateError.
DeviceModel parseDevice(std::string_view yaml, const std::string &path);
/// Loads a shipped description by its name ("cpu", "h100"), or a YAML file.
/// Throws SimulateError.
DeviceModel loadDevice(const std::string &nameOrPath);
/// Names of the shipped descriptions.
std::vector<std::string> shippedDevices();

/// Where a plan runs: a device, and how many of them.
struct Cluster {
  DeviceModel device;
  int64_t hosts = 1;
};

/// Reads a cluster (keys `device`, `ranks`, `hosts`, `ranks_per_host`,
/// `override`), on which the job's `ranks` must fit. A device's path is
/// relative to the file. Throws SimulateError.
Cluster loadCluster(const std::string &path, int64_t ranks);
Cluster parseCluster(std::string_view yaml, const std::string &path,
                     int64_t ranks);
/// As many hosts as the ranks fill.
Cluster clusterOf(DeviceModel device, int64_t ranks);

} // namespace fsdp::simulate

#endif // FSDP_SIMULATE_DEVICEMODEL_H

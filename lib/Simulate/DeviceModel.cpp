//===- DeviceModel.cpp - reading descriptions, timing transfers -----------===//
#include "fsdp/Simulate/DeviceModel.h"

#include "YamlReader.h"
#include "fsdp/Support/Files.h"
#include "fsdp/Support/Nearest.h"
#include "fsdp/Support/YamlText.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/Path.h"

#include <algorithm>
#include <memory>

using llvm::ArrayRef;
using llvm::StringRef;

namespace fsdp::simulate {

/// Name and text of each file in devices/, sorted by name.
ArrayRef<std::pair<StringRef, StringRef>> shippedDescriptions();

namespace {
using Range = YamlReader::Range;

constexpr StringRef kDeviceKeys[] = {"name",
                                     "peak_flops",
                                     "matmul_fraction",
                                     "attention_fraction",
                                     "memory_bandwidth",
                                     "memory_fraction",
                                     "op_overhead",
                                     "memory_capacity",
                                     "ranks_per_host",
                                     "collective_latency",
                                     "within_host",
                                     "between_hosts",
                                     "host_link",
                                     "collective_slowdown",
                                     "shared_memory",
                                     "serial_streams",
                                     "collective_copies",
                                     "fuse_pointwise"};
constexpr StringRef kRequiredKeys[] = {"name", "peak_flops",
                                       "memory_bandwidth"};

void readPeaks(const YamlReader &reader, const YamlNode &node,
               std::map<plan::DType, double> &peaks) {
  constexpr StringRef known[] = {"float32", "float64", "float16", "bfloat16",
                                 "int8"};
  reader.forEachEntry(node, "\"peak_flops\"", known, {},
                      [&](StringRef key, const YamlNode &value) {
                        peaks[*plan::parseDType(std::string_view(key))] =
                            reader.number(key, value, Range::Rate);
                      });
  if (!peaks.count(plan::DType::Float32))
    reader.error(node, "missing key \"float32\" in \"peak_flops\"");
}

void readLink(const YamlReader &reader, StringRef name, const YamlNode &node,
              Link &link) {
  reader.forEachEntry(node, "\"" + name.str() + "\"", {"latency", "bandwidth"},
                      {"bandwidth"}, [&](StringRef key, const YamlNode &value) {
                        if (key == "latency")
                          link.latency =
                              reader.number(key, value, Range::Seconds);
                        else
                          link.bandwidth =
                              reader.number(key, value, Range::Rate);
                      });
}

void readDeviceKey(const YamlReader &reader, StringRef key,
                   const YamlNode &value, DeviceModel &device) {
  auto rate = [&] { return reader.number(key, value, Range::Rate); };
  auto fraction = [&] { return reader.number(key, value, Range::Fraction); };
  auto seconds = [&] { return reader.number(key, value, Range::Seconds); };
  auto flag = [&] { return reader.boolean(key, value); };
  if (key == "name")
    device.name = reader.string(key, value);
  else if (key == "peak_flops")
    readPeaks(reader, value, device.peakFlops);
  else if (key == "matmul_fraction")
    device.matmulFraction = fraction();
  else if (key == "attention_fraction")
    device.attentionFraction = fraction();
  else if (key == "memory_bandwidth")
    device.memoryBandwidth = rate();
  else if (key == "memory_fraction")
    device.memoryFraction = fraction();
  else if (key == "op_overhead")
    device.opOverhead = seconds();
  else if (key == "memory_capacity")
    device.memoryCapacity = int64_t(reader.number(key, value, Range::Bytes));
  else if (key == "ranks_per_host")
    device.ranksPerHost = reader.count(key, value);
  else if (key == "collective_latency")
    device.collectiveLatency = seconds();
  else if (key == "within_host")
    readLink(reader, key, value, device.withinHost);
  else if (key == "between_hosts")
    readLink(reader, key, value, device.betweenHosts);
  else if (key == "host_link")
    readLink(reader, key, value, device.hostLink);
  else if (key == "collective_slowdown")
    device.collectiveSlowdown = reader.number(key, value, Range::Factor);
  else if (key == "shared_memory")
    device.sharedMemory = flag();
  else if (key == "serial_streams")
    device.serialStreams = flag();
  else if (key == "collective_copies")
    device.collectiveCopies = flag();
  else
    device.fusePointwise = flag();
}

std::string readYaml(const std::string &path) {
  std::string text;
  if (std::string error = readFile(path, kMaxYamlBytes, text); !error.empty())
    throw SimulateError(path + ": " + error);
  return text;
}

/// A shipped description, or a file, whose path is relative to `folder`.
DeviceModel loadFrom(StringRef folder, const std::string &nameOrPath) {
  for (const auto &[name, text] : shippedDescriptions())
    if (name == nameOrPath)
      return parseDevice(text, "devices/" + name.str() + ".yaml");
  llvm::SmallString<128> path;
  if (!llvm::sys::path::is_absolute(nameOrPath))
    path = folder;
  llvm::sys::path::append(path, nameOrPath);
  StringRef extension = llvm::sys::path::extension(nameOrPath);
  if (extension == ".yaml" || extension == ".yml" ||
      llvm::sys::fs::exists(path))
    return parseDevice(readYaml(path.str().str()), path.str().str());
  std::vector<std::string> names = shippedDevices();
  llvm::SmallVector<StringRef> known(names.begin(), names.end());
  throw SimulateError("unknown device \"" + nameOrPath + "\"" +
                      nearest(nameOrPath, known) +
                      " (or the path of a .yaml file)");
}
} // namespace

double DeviceModel::peak(plan::DType dtype) const {
  auto found = peakFlops.find(dtype);
  return found != peakFlops.end() ? found->second
                                  : peakFlops.at(plan::DType::Float32);
}

/// Ranks of the axis on one host, at most.
static int64_t ranksOnHost(const DeviceModel &device, Axis axis) {
  int64_t fitting = (device.ranksPerHost + axis.stride - 1) / axis.stride;
  return std::clamp<int64_t>(fitting, 1, axis.ranks);
}

int64_t hostsOf(const DeviceModel &device, Axis axis) {
  int64_t onHost = ranksOnHost(device, axis);
  return (axis.ranks + onHost - 1) / onHost;
}

Axis shardAxis(const plan::Plan &plan, int64_t group) {
  return {group > 0 ? group : plan.shards(),
          plan.modelParallel ? plan.modelParallel->dataStride : 1};
}

Axis replicateAxis(const plan::Plan &plan) {
  return {plan.replicas, plan.shards() * shardAxis(plan).stride};
}

/// Of an AllToAll, or a SendReceive.
static Transfer directTime(const DeviceModel &device, Collective collective,
                           Axis axis, double bytes) {
  double n = double(axis.ranks), m = double(ranksOnHost(device, axis));
  bool leaves = hostsOf(device, axis) > 1;
  double inside = 0, outside = 0;
  if (collective == Collective::AllToAll) {
    inside = bytes * (m - 1) / n;
    outside = bytes * (n - m) / n;
  } else {
    (leaves ? outside : inside) = bytes;
  }
  double within = inside > 0 ? inside / device.withinHost.bandwidth : 0;
  double between = outside > 0 ? outside / device.betweenHosts.bandwidth : 0;
  return {device.collectiveLatency +
              (leaves ? device.betweenHosts : device.withinHost).latency +
              std::max(within, between),
          leaves ? Medium::BetweenHosts : Medium::WithinHost};
}

Transfer transferTime(const DeviceModel &device, Collective collective,
                      Axis axis, double bytes) {
  if (axis.ranks <= 1)
    return {};
  double n = double(axis.ranks), m = double(ranksOnHost(device, axis)),
         hosts = double(hostsOf(device, axis));
  if (device.sharedMemory && hosts == 1) {
    double read = collective == Collective::AllGather   ? 0
                  : collective == Collective::AllReduce ? n * bytes
                                                        : bytes;
    double written = collective == Collective::AllGather       ? 0
                     : collective == Collective::ReduceScatter ? bytes / n
                                                               : bytes;
    return {device.collectiveLatency +
                (read + written) /
                    (device.memoryBandwidth * device.memoryFraction),
            Medium::WithinHost};
  }
  if (collective == Collective::AllToAll ||
      collective == Collective::SendReceive)
    return directTime(device, collective, axis, bytes);
  double rounds = collective == Collective::AllReduce ? 2 : 1;
  double within = 0, between = 0;
  if (m > 1)
    within = bytes * (n - 1) / n / device.withinHost.bandwidth;
  if (hosts > 1)
    between = bytes * (hosts - 1) / hosts / (m * device.betweenHosts.bandwidth);
  double hops = (n - hosts) * device.withinHost.latency +
                (hosts - 1) * device.betweenHosts.latency;
  return {device.collectiveLatency +
              rounds * (hops + std::max(within, between)),
          hosts > 1 ? Medium::BetweenHosts : Medium::WithinHost};
}

DeviceModel parseDevice(std::string_view yaml, const std::string &path) {
  YamlReader reader(path);
  DeviceModel device;
  YamlNode root = reader.parse(yaml);
  reader.forEachEntry(root, "a device", kDeviceKeys, kRequiredKeys,
                      [&](StringRef key, const YamlNode &value) {
                        readDeviceKey(reader, key, value, device);
                      });
  // What a rank's transfers need.
  if (device.ranksPerHost > 1 && !device.sharedMemory &&
      device.withinHost.bandwidth == 0)
    reader.error(root, "missing key \"within_host\" in a device with "
                       "\"ranks_per_host\" above 1");
  return device;
}

DeviceModel loadDevice(const std::string &nameOrPath) {
  return loadFrom("", nameOrPath);
}

std::vector<std::string> shippedDevices() {
  std::vector<std::string> names;
  for (const auto &[name, text] : shippedDescriptions())
    names.push_back(name.str());
  return names;
}

Cluster clusterOf(DeviceModel device, int64_t ranks) {
  int64_t hosts = hostsOf(device, {ranks, 1});
  return {std::move(device), hosts};
}

Cluster parseCluster(std::string_view yaml, const std::string &path,
                     int64_t ranks) {
  YamlReader reader(path);
  YamlNode root = reader.parse(yaml);
  DeviceModel device;
  const YamlNode *hosts = nullptr, *override = nullptr, *perHost = nullptr;
  reader.forEachEntry(
      root, "a cluster",
      {"device", "ranks", "hosts", "ranks_per_host", "override"}, {"device"},
      [&](StringRef key, const YamlNode &value) {
        if (key == "device") {
          std::string name = reader.string(key, value);
          try {
            device = loadFrom(llvm::sys::path::parent_path(path), name);
          } catch (const SimulateError &failure) {
            if (StringRef(failure.what()).starts_with("unknown device"))
              reader.error(value, failure.what());
            throw;
          }
        } else if (key == "ranks") {
          int64_t given = reader.count(key, value);
          if (given != ranks)
            reader.error(value, "expected \"ranks\" to be the plan's world "
                                "size " +
                                    std::to_string(ranks) + ", got " +
                                    std::to_string(given));
        } else {
          (key == "hosts"      ? hosts
           : key == "override" ? override
                               : perHost) = &value;
        }
      });
  if (override)
    reader.forEachEntry(*override, "\"override\"", kDeviceKeys, {},
                        [&](StringRef key, const YamlNode &value) {
                          readDeviceKey(reader, key, value, device);
                        });
  if (perHost)
    device.ranksPerHost = reader.count("ranks_per_host", *perHost);
  Cluster cluster = clusterOf(std::move(device), ranks);
  if (hosts) {
    int64_t given = reader.count("hosts", *hosts);
    if (given < cluster.hosts)
      reader.error(*hosts, "expected \"hosts\" to be at least " +
                               std::to_string(cluster.hosts) + " for " +
                               std::to_string(ranks) + " ranks, " +
                               std::to_string(cluster.device.ranksPerHost) +
                               " on each, got " + std::to_string(given));
  }
  if (cluster.hosts > 1 && cluster.device.betweenHosts.bandwidth == 0)
    reader.error(root, "expected a device with \"between_hosts\" for " +
                           std::to_string(cluster.hosts) + " hosts, got \"" +
                           cluster.device.name + "\"");
  return cluster;
}

Cluster loadCluster(const std::string &path, int64_t ranks) {
  return parseCluster(readYaml(path), path, ranks);
}

} // namespace fsdp::simulate

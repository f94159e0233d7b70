//===- CudaMemory.cpp - ranges of addresses of a GPU and of pinned memory -===//
#include "CudaMemory.h"
#include "CudaError.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <string>
#include <vector>

namespace fsdp::runtime {

namespace {

constexpr size_t kHugePage = size_t(2) << 20;

size_t roundUp(size_t bytes, size_t granule) {
  return (bytes + granule - 1) / granule * granule;
}

/// A function of the driver. It is asked for through the CUDA runtime: linked,
/// libcuda would have to be there where there is no GPU.
template <typename Function> void find(Function &function, const char *name) {
  void *found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  checkCuda(cudaGetDriverEntryPointByVersion(name, &found,
                                             /*cudaVersion=*/12000,
                                             cudaEnableDefault, &result),
            std::string("find ") + name + " in the CUDA driver");
  if (result != cudaDriverEntryPointSuccess)
    throw RunError(std::string("expected a CUDA driver with ") + name +
                   ", got one without");
  function = reinterpret_cast<Function>(found);
}

struct Driver {
  decltype(&cuGetErrorName) getErrorName = nullptr;
  decltype(&cuDeviceGetAttribute) deviceGetAttribute = nullptr;
  decltype(&cuMemGetAllocationGranularity) getGranularity = nullptr;
  decltype(&cuMemAddressReserve) addressReserve = nullptr;
  decltype(&cuMemAddressFree) addressFree = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) setAccess = nullptr;

  Driver() {
    find(getErrorName, "cuGetErrorName");
    find(deviceGetAttribute, "cuDeviceGetAttribute");
    find(getGranularity, "cuMemGetAllocationGranularity");
    find(addressReserve, "cuMemAddressReserve");
    find(addressFree, "cuMemAddressFree");
    find(create, "cuMemCreate");
    find(release, "cuMemRelease");
    find(map, "cuMemMap");
    find(unmap, "cuMemUnmap");
    find(setAccess, "cuMemSetAccess");
  }

  void check(CUresult result, const std::string &what) const {
    if (result == CUDA_SUCCESS)
      return;
    const char *name = nullptr;
    getErrorName(result, &name);
    throw RunError("cannot " + what + ": " +
                   (name ? name : std::to_string(result)));
  }

  bool has(CUdevice_attribute attribute, int index) const {
    int value = 0;
    return deviceGetAttribute(&value, attribute, index) == CUDA_SUCCESS &&
           value != 0;
  }
};

const Driver &driver() {
  static const Driver instance;
  return instance;
}

class CudaMemory final : public DeviceMemory {
public:
  CudaMemory(int index, size_t wanted) : index(index) {
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {index}};
    if (driver().has(
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            index))
      properties.requestedHandleTypes =
          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (driver().has(
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, index))
      properties.allocFlags.gpuDirectRDMACapable = 1;
    driver().check(
        driver().getGranularity(&granule, &properties,
                                CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
        "determine the page size of " + name());
    size_t align = granule < kHugePage ? kHugePage : granule;
    size = roundUp(wanted, align);
    driver().check(driver().addressReserve(&begin, size, align, 0, 0),
                   "reserve " + std::to_string(size) +
                       " bytes of addresses of " + name());
  }
  CudaMemory(const CudaMemory &) = delete;
  CudaMemory &operator=(const CudaMemory &) = delete;
  /// Errors are the device's, and reported where it is used.
  ~CudaMemory() override {
    (void)cudaDeviceSynchronize();
    CUdeviceptr at = begin;
    for (size_t piece : pieces) {
      driver().unmap(at, piece);
      at += piece;
    }
    driver().addressFree(begin, size);
  }

  std::byte *base() const override {
    return reinterpret_cast<std::byte *>(begin);
  }
  size_t bytes() const override { return size; }

  void back(size_t bytes) override {
    if (bytes <= backed)
      return;
    if (bytes > size)
      throw RunError("expected at most " + std::to_string(size) +
                     " bytes to be backed, got " + std::to_string(bytes));
    size_t piece = roundUp(bytes - backed, granule);
    std::string what = "allocate " + std::to_string(piece) + " bytes of " +
                       name() + " beyond " + std::to_string(backed);
    CUmemGenericAllocationHandle handle = 0;
    CUresult result = driver().create(&handle, piece, &properties, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
      // We may take what torch caches for later allocations.
      c10::cuda::CUDACachingAllocator::emptyCache();
      result = driver().create(&handle, piece, &properties, 0);
    }
    driver().check(result, what);
    result = driver().map(begin + backed, piece, 0, handle, 0);
    // The mapping keeps the memory from here on.
    driver().release(handle);
    driver().check(result, what);
    pieces.push_back(piece);
    CUmemAccessDesc access{properties.location,
                           CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    result = driver().setAccess(begin + backed, piece, &access, 1);
    backed += piece;
    driver().check(result, what);
  }

private:
  std::string name() const { return "GPU " + std::to_string(index); }

  const int index;
  CUmemAllocationProp properties = {};
  size_t granule = 0;
  size_t size = 0;
  CUdeviceptr begin = 0;
  size_t backed = 0;
  std::vector<size_t> pieces; ///< bytes of each, in order
};

class PinnedMemory final : public DeviceMemory {
public:
  explicit PinnedMemory(size_t wanted) : size(roundUp(wanted, kHugePage)) {
    // cudaHostAlloc promises a page's alignment only.
    checkCuda(cudaHostAlloc(&block, size + kHugePage, cudaHostAllocPortable),
              "allocate " + std::to_string(size + kHugePage) +
                  " bytes of pinned memory");
    begin = reinterpret_cast<std::byte *>(
        roundUp(reinterpret_cast<uintptr_t>(block), kHugePage));
  }
  PinnedMemory(const PinnedMemory &) = delete;
  PinnedMemory &operator=(const PinnedMemory &) = delete;
  ~PinnedMemory() override { (void)cudaFreeHost(block); }

  std::byte *base() const override { return begin; }
  size_t bytes() const override { return size; }
  void back(size_t bytes) override {
    if (bytes > size)
      throw RunError("expected at most " + std::to_string(size) +
                     " bytes to be backed, got " + std::to_string(bytes));
  }

private:
  size_t size;
  void *block = nullptr;
  std::byte *begin = nullptr;
};

} // namespace

std::unique_ptr<DeviceMemory> reserveCuda(int index, size_t bytes) {
  return std::make_unique<CudaMemory>(index, bytes);
}

std::unique_ptr<DeviceMemory> reservePinned(size_t bytes) {
  return std::make_unique<PinnedMemory>(bytes);
}

} // namespace fsdp::runtime

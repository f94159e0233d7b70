//===- FakeCuda.cpp - PyTorch's choices for a GPU that is not there -------===//
//
// For captures on fake CUDA tensors (python/fsdp_mlir/view/device.py). What
// PyTorch asks of a GPU while it runs on them is how many there are, which
// architecture, and whether a context exists. The first two libtorch_cuda asks
// by functions that it calls through its table of imports: the entries of these
// are replaced there, and PyTorch's own code, which attention kernels to take
// above all, runs as it would beside that GPU. The third is a virtual function
// of PyTorch's object of CUDA hooks, which has a copy of its virtual table
// during a capture. Outside of one, all is as it was.
//
// Loaded with ctypes. One thread at a time.
//
//===----------------------------------------------------------------------===//
#include <ATen/detail/CUDAHooksInterface.h>
#include <cuda_runtime_api.h>
#include <torch/version.h>

#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

/// The GPU of the capture under way.
cudaDeviceProp properties;
bool active = false;

cudaDeviceProp *(*askProperties)() = nullptr;
signed char (*askCount)() = nullptr;

cudaDeviceProp *getCurrentDeviceProperties() {
  return active ? &properties : askProperties();
}

signed char deviceCount() { return active ? 1 : askCount(); }

/// A function that libtorch_cuda imports, by its mangled name.
struct Import {
  const char *name;
  const char *shown;
  void *replacement;
  void **original;
};

const Import kImports[] = {
    {"_ZN2at4cuda26getCurrentDevicePropertiesEv",
     "at::cuda::getCurrentDeviceProperties",
     reinterpret_cast<void *>(&getCurrentDeviceProperties),
     reinterpret_cast<void **>(&askProperties)},
    {"_ZN3c104cuda12device_countEv", "c10::cuda::device_count",
     reinterpret_cast<void *>(&deviceCount),
     reinterpret_cast<void **>(&askCount)},
};

/// libtorch_cuda's table of imported functions, as the loader sees it.
struct ImportTable {
  std::string library;
  ElfW(Addr) base = 0;
  const ElfW(Rela) *entries = nullptr;
  size_t count = 0;
  const ElfW(Sym) *symbols = nullptr;
  const char *names = nullptr;

  static int find(dl_phdr_info *info, size_t, void *result) {
    if (!info->dlpi_name || !std::strstr(info->dlpi_name, "/libtorch_cuda.so"))
      return 0;
    auto &table = *static_cast<ImportTable *>(result);
    table.library = info->dlpi_name;
    table.base = info->dlpi_addr;
    for (ElfW(Half) i = 0; i < info->dlpi_phnum; ++i) {
      if (info->dlpi_phdr[i].p_type != PT_DYNAMIC)
        continue;
      auto *entry = reinterpret_cast<const ElfW(Dyn) *>(
          table.base + info->dlpi_phdr[i].p_vaddr);
      for (; entry->d_tag != DT_NULL; ++entry)
        table.note(*entry);
    }
    return 1;
  }

  void note(const ElfW(Dyn) & entry) {
    switch (entry.d_tag) {
    case DT_JMPREL:
      entries = reinterpret_cast<const ElfW(Rela) *>(entry.d_un.d_ptr);
      break;
    case DT_PLTRELSZ:
      count = entry.d_un.d_val / sizeof(ElfW(Rela));
      break;
    case DT_SYMTAB:
      symbols = reinterpret_cast<const ElfW(Sym) *>(entry.d_un.d_ptr);
      break;
    case DT_STRTAB:
      names = reinterpret_cast<const char *>(entry.d_un.d_ptr);
      break;
    default:
      break;
    }
  }

  /// Where the address of a function is kept; null if it is not imported.
  void **slotOf(const char *name) const {
    for (size_t i = 0; i < count; ++i) {
      const ElfW(Sym) &symbol = symbols[ELF64_R_SYM(entries[i].r_info)];
      if (std::strcmp(names + symbol.st_name, name) == 0)
        return reinterpret_cast<void **>(base + entries[i].r_offset);
    }
    return nullptr;
  }
};

/// The loader may have made the table read-only after it had filled it.
bool makeWritable(void **slot) {
  auto page = uintptr_t(sysconf(_SC_PAGESIZE));
  auto begin = reinterpret_cast<uintptr_t>(slot) & ~(page - 1);
  return mprotect(reinterpret_cast<void *>(begin), page,
                  PROT_READ | PROT_WRITE) == 0;
}

/// Replaces the imports, all or none; empty, or what is missing.
std::string replaceImports() {
  ImportTable table;
  if (dl_iterate_phdr(&ImportTable::find, &table) == 0)
    return "expected a PyTorch with CUDA, got a build for the CPU alone";
  void *library = dlopen(table.library.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  void **slots[std::size(kImports)];
  for (size_t i = 0; i < std::size(kImports); ++i) {
    const Import &import = kImports[i];
    *import.original = library ? dlsym(library, import.name) : nullptr;
    slots[i] = table.slotOf(import.name);
    if (!*import.original || !slots[i] || !makeWritable(slots[i]))
      return std::string("this build of PyTorch does not import ") +
             import.shown + " into libtorch_cuda, which was to be replaced";
  }
  for (size_t i = 0; i < std::size(kImports); ++i)
    *slots[i] = kImports[i].replacement;
  return {};
}

//===----------------------------------------------------------------------===//
// The virtual table (Itanium C++ ABI): two words before its first function
//===----------------------------------------------------------------------===//

constexpr size_t kWordsBefore = 2;

/// Has one function more than the hooks.
struct MoreHooks : at::CUDAHooksInterface {
  virtual void afterAll() {}
};

template <typename Member> size_t slotOfVirtual(Member member) {
  uintptr_t words[2];
  static_assert(sizeof(member) == sizeof(words));
  std::memcpy(words, &member, sizeof(words));
  return (words[0] - 1) / sizeof(void *);
}

/// None: autograd then asks for no streams.
bool hasPrimaryContext(const void *, c10::DeviceIndex) { return false; }

class HooksTable {
public:
  void replace() {
    void **now = *object();
    if (table.empty()) {
      table.assign(now - kWordsBefore,
                   now + slotOfVirtual(&MoreHooks::afterAll));
      table[kWordsBefore +
            slotOfVirtual(&at::CUDAHooksInterface::hasPrimaryContext)] =
          reinterpret_cast<void *>(&hasPrimaryContext);
    }
    original = now;
    *object() = table.data() + kWordsBefore;
  }
  void restore() { *object() = original; }

private:
  static void ***object() {
    return reinterpret_cast<void ***>(
        const_cast<at::CUDAHooksInterface *>(&at::detail::getCUDAHooks()));
  }

  std::vector<void *> table;
  void **original = nullptr;
};

HooksTable hooks;

} // namespace

extern "C" {

/// The PyTorch with whose headers this was built. The place of a function in
/// the virtual table is that of this version alone.
const char *fsdp_fake_cuda_torch() { return TORCH_VERSION; }

/// Until `end`, PyTorch takes it that there is one GPU of this compute
/// capability. Null, or one line that says what is missing.
const char *fsdp_fake_cuda_begin(int major, int minor) {
  static const std::string missing = replaceImports();
  if (!missing.empty())
    return missing.c_str();
  properties.major = major;
  properties.minor = minor;
  hooks.replace();
  active = true;
  return nullptr;
}

void fsdp_fake_cuda_end() {
  active = false;
  hooks.restore();
}
}

//===- PluginVersion.cpp - the version in the file of a plug-in -----------===//
//
// To load a library is to run it. So the version is a number in its data, found
// through the table of dynamic symbols of the ELF file.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Files/Files.h"
#include "fsdp/Runtime/Optimizer/OptimizerPlugin.h"

#include <cstring>
#include <optional>
#include <string_view>

#include <elf.h>

namespace fsdp::runtime {

namespace {

constexpr std::string_view kSymbol = "fsdpOptimizerPluginVersion";

/// A file that is not trusted in any way.
class ElfFile {
public:
  explicit ElfFile(std::string_view bytes) : bytes(bytes) {}

  /// Of a data symbol of 8 bytes, or more where a sanitizer guards it; nothing
  /// if there is none.
  std::optional<int64_t> number(std::string_view symbol) const {
    auto header = at<Elf64_Ehdr>(0);
    if (!header || std::memcmp(header->e_ident, ELFMAG, SELFMAG) != 0 ||
        header->e_ident[EI_CLASS] != ELFCLASS64 ||
        header->e_ident[EI_DATA] != ELFDATA2LSB || header->e_type != ET_DYN)
      return std::nullopt;
    for (uint64_t s = 0; s < header->e_shnum; ++s) {
      auto table = entry<Elf64_Shdr>(header->e_shoff, s);
      if (!table || table->sh_type != SHT_DYNSYM)
        continue;
      auto names = entry<Elf64_Shdr>(header->e_shoff, table->sh_link);
      for (uint64_t i = 0; names && i < table->sh_size / sizeof(Elf64_Sym);
           ++i) {
        auto found = entry<Elf64_Sym>(table->sh_offset, i);
        if (found && found->st_shndx != SHN_UNDEF &&
            ELF64_ST_TYPE(found->st_info) == STT_OBJECT &&
            found->st_size >= sizeof(int64_t) &&
            text(names->sh_offset, found->st_name) == symbol)
          return loaded(*header, found->st_value);
      }
    }
    return std::nullopt;
  }

private:
  template <typename T> std::optional<T> at(uint64_t offset) const {
    if (offset > bytes.size() || bytes.size() - offset < sizeof(T))
      return std::nullopt;
    T value;
    std::memcpy(&value, bytes.data() + offset, sizeof(T));
    return value;
  }

  /// Entry `index` of a table at `offset`.
  template <typename T>
  std::optional<T> entry(uint64_t offset, uint64_t index) const {
    if (offset > bytes.size() || index > bytes.size() / sizeof(T))
      return std::nullopt;
    return at<T>(offset + index * sizeof(T));
  }

  /// The text at `index` of the strings at `offset`.
  std::string_view text(uint64_t offset, uint64_t index) const {
    if (offset > bytes.size() || index > bytes.size() - offset)
      return {};
    std::string_view rest = bytes.substr(offset + index);
    return rest.substr(0, rest.find('\0'));
  }

  /// What is at an address once the file is loaded.
  std::optional<int64_t> loaded(const Elf64_Ehdr &header,
                                uint64_t address) const {
    for (uint64_t p = 0; p < header.e_phnum; ++p) {
      auto segment = entry<Elf64_Phdr>(header.e_phoff, p);
      if (segment && segment->p_type == PT_LOAD &&
          address >= segment->p_vaddr &&
          address - segment->p_vaddr < segment->p_filesz &&
          segment->p_offset <= bytes.size())
        return at<int64_t>(segment->p_offset + (address - segment->p_vaddr));
    }
    return std::nullopt;
  }

  std::string_view bytes;
};

} // namespace

void checkOptimizerLibrary(const std::string &path) {
  std::string bytes = readFile(path);
  auto version = ElfFile(bytes).number(kSymbol);
  if (!version)
    throw InputError(path + ": expected a shared library with "
                            "FSDP_OPTIMIZER_PLUGIN, found none in it");
  if (*version != kOptimizerPluginVersion)
    throw InputError(
        path + ": expected version " + std::to_string(kOptimizerPluginVersion) +
        " of the plug-in interface, got " + std::to_string(*version));
}

} // namespace fsdp::runtime

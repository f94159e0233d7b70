//===- LinkImage.cpp - an object file as bytes that refer to themselves ---===//
#include "LinkImage.h"

#include "fsdp/Plan/Tensors.h"
#include "llvm/ADT/DenseMap.h"
#include "llvm/Object/ELFObjectFile.h"
#include "llvm/Support/Endian.h"

using namespace llvm;
using namespace llvm::object;
using mlir::fsdp::MachineCode;

namespace {

template <typename... Ts> Error makeError(const char *format, Ts... values) {
  return createStringError(inconvertibleErrorCode(), format, values...);
}

class Linker {
public:
  explicit Linker(const ELF64LEObjectFile &object) : object(object) {}

  Expected<MachineCode> run(StringRef name) {
    for (const SectionRef &section : object.sections())
      if (Error error = place(section))
        return std::move(error);
    for (const SectionRef &section : object.sections())
      if (Error error = relocate(section))
        return std::move(error);
    for (const ELFSymbolRef symbol : object.symbols()) {
      Expected<StringRef> found = symbol.getName();
      if (!found)
        return found.takeError();
      if (*found != name || symbol.getELFType() != ELF::STT_FUNC)
        continue;
      Expected<uint64_t> entry = offsetOf(symbol);
      if (!entry)
        return entry.takeError();
      code.entry = int64_t(*entry);
      return std::move(code);
    }
    return makeError("expected a function %s, found none", name.str().c_str());
  }

private:
  Error place(const SectionRef &section) {
    ELFSectionRef elf(section);
    if (!(elf.getFlags() & ELF::SHF_ALLOC) || section.getSize() == 0)
      return Error::success();
    Expected<StringRef> name = section.getName();
    if (!name)
      return name.takeError();
    if (name->starts_with(".eh_frame"))
      return Error::success(); // nothing unwinds through a kernel
    if ((elf.getFlags() & (ELF::SHF_WRITE | ELF::SHF_TLS)) ||
        elf.getType() != ELF::SHT_PROGBITS)
      return makeError("expected code and constants, got section %s",
                       name->str().c_str());
    Expected<StringRef> contents = section.getContents();
    if (!contents)
      return contents.takeError();
    code.image.resize(::fsdp::plan::alignTo<uint64_t>(
        code.image.size(), section.getAlignment().value()));
    offsets[section.getIndex()] = code.image.size();
    code.image += contents->str();
    return Error::success();
  }

  Expected<uint64_t> offsetOf(const ELFSymbolRef &symbol) {
    Expected<section_iterator> section = symbol.getSection();
    if (!section)
      return section.takeError();
    auto found = *section == object.section_end()
                     ? offsets.end()
                     : offsets.find((*section)->getIndex());
    if (found == offsets.end())
      return makeError("expected no reference to a symbol outside: %s",
                       cantFail(symbol.getName()).str().c_str());
    Expected<uint64_t> value = symbol.getValue();
    if (!value)
      return value.takeError();
    return found->second + *value;
  }

  Error relocate(const SectionRef &section) {
    Expected<section_iterator> target = section.getRelocatedSection();
    if (!target)
      return target.takeError();
    if (*target == object.section_end())
      return Error::success();
    auto base = offsets.find((*target)->getIndex());
    if (base == offsets.end())
      return Error::success();
    for (const ELFRelocationRef relocation : section.relocations()) {
      uint64_t type = relocation.getType();
      if (type != ELF::R_X86_64_PC32 && type != ELF::R_X86_64_PLT32)
        return makeError("expected references relative to the code, got one of "
                         "type %d",
                         int(type));
      Expected<uint64_t> symbol = offsetOf(*relocation.getSymbol());
      if (!symbol)
        return symbol.takeError();
      Expected<int64_t> addend = relocation.getAddend();
      if (!addend)
        return addend.takeError();
      uint64_t place = base->second + relocation.getOffset();
      support::endian::write32le(
          code.image.data() + place,
          uint32_t(int64_t(*symbol) + *addend - int64_t(place)));
    }
    return Error::success();
  }

  const ELF64LEObjectFile &object;
  MachineCode code;
  /// By the index of a section, where it begins.
  DenseMap<uint64_t, uint64_t> offsets;
};

} // namespace

Expected<MachineCode> mlir::fsdp::linkImage(MemoryBufferRef object,
                                            StringRef name) {
  Expected<std::unique_ptr<ObjectFile>> file =
      ObjectFile::createELFObjectFile(object);
  if (!file)
    return file.takeError();
  return Linker(cast<ELF64LEObjectFile>(**file)).run(name);
}

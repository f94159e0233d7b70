//===- InstructionTable.cpp - what a plan's instructions are, for people --===//
#include "fsdp/Plan/InstructionTable.h"

#include "fsdp/Plan/Instructions.h"

namespace fsdp::plan {

namespace {

/// "`params`, `ins`, optional `group`": those after the verb.
class Keys {
public:
  template <HasFields StructT> void add(const char *verb, bool areOptional) {
    forEachField<StructT>([&]<typename FieldT>(const FieldT &field) {
      bool isOptional = areOptional || FieldT::isOptional;
      if (field.isInlined())
        return addInlined<StructT>(field);
      if (std::string_view(field.key) == verb)
        return;
      text += text.empty() ? "" : ", ";
      if (isOptional && !sawOptional)
        text += "optional ";
      sawOptional |= isOptional;
      text += "`" + std::string(field.key) + "`";
    });
  }
  std::string text;

private:
  template <typename StructT, typename FieldT>
  void addInlined(const FieldT &field) {
    using Member =
        std::remove_cvref_t<decltype(field.in(std::declval<StructT &>()))>;
    if constexpr (requires { typename Member::value_type; })
      if constexpr (HasFields<typename Member::value_type>)
        add<typename Member::value_type>("", FieldT::isOptional);
  }

  bool sawOptional = false;
};

} // namespace

std::string printInstructionTable() {
  std::string text = "| key | further keys | meaning |\n"
                     "| --- | --- | --- |\n";
  forEachKind([&]<typename KindT>(const KindT &) {
    Keys keys;
    keys.add<KindT>(KindT::verb, /*areOptional=*/false);
    text += "| `" + std::string(KindT::verb) + "` | " + keys.text +
            (keys.text.empty() ? "| " : " | ") + KindT::meaning + " |\n";
  });
  return text;
}

} // namespace fsdp::plan

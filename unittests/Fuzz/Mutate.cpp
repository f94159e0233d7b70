//===- Mutate.cpp - inputs from inputs ------------------------------------===//
#include "Fuzz.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace fsdp::fuzz {

namespace {

struct Token {
  enum class Kind { Word, Number, String, Bracket, Other, Space } kind;
  std::string_view text;
};

constexpr std::array<std::string_view, 24> kNumbers = {"0",
                                                       "-1",
                                                       "1",
                                                       "2",
                                                       "3",
                                                       "7",
                                                       "127",
                                                       "255",
                                                       "65536",
                                                       "1048577",
                                                       "2147483647",
                                                       "2147483648",
                                                       "-2147483648",
                                                       "4294967296",
                                                       "9223372036854775807",
                                                       "-9223372036854775808",
                                                       "9223372036854775808",
                                                       "18446744073709551616",
                                                       "0.0",
                                                       "-0.0",
                                                       "1e308",
                                                       "1e-320",
                                                       "1e999",
                                                       "nan"};

bool isWord(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' ||
         c == ':' || c == '%' || c == '@' || c == '#' || c == '!';
}

size_t lengthOfToken(std::string_view text) {
  char c = text[0];
  auto spanOf = [&](auto &&belongs) {
    size_t n = 1;
    while (n < text.size() && belongs(text[n]))
      ++n;
    return n;
  };
  if (c == '"') {
    size_t n = 1;
    while (n < text.size() && text[n] != '"' && text[n] != '\n')
      n += text[n] == '\\' ? 2 : 1;
    return std::min(n + 1, text.size());
  }
  if (c == ' ' || c == '\t' || c == '\n')
    return spanOf([](char d) { return d == ' ' || d == '\t' || d == '\n'; });
  if (isWord(c))
    return spanOf(isWord);
  return 1;
}

std::vector<Token> tokenize(std::string_view text) {
  std::vector<Token> tokens;
  while (!text.empty()) {
    std::string_view token = text.substr(0, lengthOfToken(text));
    char c = token[0];
    auto kind =
        c == '"'                                      ? Token::Kind::String
        : std::isdigit(static_cast<unsigned char>(c)) ? Token::Kind::Number
        : isWord(c)                                   ? Token::Kind::Word
        : std::isspace(static_cast<unsigned char>(c)) ? Token::Kind::Space
        : std::string_view("()[]{}<>").find(c) != std::string_view::npos
            ? Token::Kind::Bracket
            : Token::Kind::Other;
    tokens.push_back({kind, token});
    text.remove_prefix(token.size());
  }
  return tokens;
}

std::string join(const std::vector<Token> &tokens) {
  std::string text;
  for (const Token &token : tokens)
    text += token.text;
  return text;
}

/// From the opening bracket at `begin` to behind the one that closes it.
size_t endOfBrackets(const std::vector<Token> &tokens, size_t begin) {
  int depth = 0;
  for (size_t i = begin; i < tokens.size(); ++i) {
    if (tokens[i].kind != Token::Kind::Bracket)
      continue;
    bool opens = std::string_view("([{<").find(tokens[i].text[0]) !=
                 std::string_view::npos;
    depth += opens ? 1 : -1;
    if (depth == 0)
      return i + 1;
  }
  return tokens.size();
}

std::pair<size_t, size_t> bracketed(const std::vector<Token> &tokens,
                                    Random &random) {
  for (int tries = 0; tries < 20; ++tries) {
    size_t begin = random.below(tokens.size());
    if (tokens[begin].kind == Token::Kind::Bracket)
      return {begin, endOfBrackets(tokens, begin)};
  }
  size_t begin = random.below(tokens.size());
  return {begin, begin + 1};
}

std::vector<std::string_view> linesOf(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    size_t end = text.find('\n');
    end = end == std::string_view::npos ? text.size() : end + 1;
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end);
  }
  return lines;
}

std::string mutateLines(std::string_view text, std::string_view donor,
                        Random &random) {
  std::vector<std::string_view> lines = linesOf(text), others = linesOf(donor);
  size_t at = random.below(lines.size());
  switch (random.below(4)) {
  case 0:
    lines.erase(lines.begin() + long(at));
    break;
  case 1:
    lines.insert(lines.begin() + long(at), lines[random.below(lines.size())]);
    break;
  case 2:
    std::swap(lines[at], lines[random.below(lines.size())]);
    break;
  default:
    if (!others.empty())
      lines[at] = others[random.below(others.size())];
  }
  std::string result;
  for (std::string_view line : lines)
    result += line;
  return result;
}

std::string nest(std::vector<Token> tokens, Random &random) {
  constexpr std::array<std::pair<std::string_view, std::string_view>, 5> pairs =
      {{{"[", "]"}, {"{a: ", "}"}, {"(", ")"}, {"{\"a\": ", "}"}, {"<", ">"}}};
  auto [opening, closing] = pairs[random.below(pairs.size())];
  size_t at = random.below(tokens.size());
  size_t depth = random.oneIn(4) ? 20000 : 1 + random.below(80);
  std::string before, after;
  for (size_t i = 0; i < depth; ++i) {
    before += opening;
    after += closing;
  }
  std::string text;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i == at)
      text += before;
    text += tokens[i].text;
    if (i == at && !random.oneIn(3))
      text += after;
  }
  return text;
}

/// Of the same kind as the one at `at`, from the text or the donor.
std::string_view similar(const std::vector<Token> &tokens,
                         const std::vector<Token> &others, size_t at,
                         Random &random) {
  for (int tries = 0; tries < 50; ++tries) {
    const auto &from = others.empty() || random.oneIn(2) ? tokens : others;
    const Token &token = from[random.below(from.size())];
    if (token.kind == tokens[at].kind)
      return token.text;
  }
  return tokens[at].text;
}

std::string mutateTokens(std::string_view text, std::string_view donor,
                         Random &random) {
  std::vector<Token> tokens = tokenize(text), others = tokenize(donor);
  size_t at = random.below(tokens.size());
  while (tokens[at].kind == Token::Kind::Space && !random.oneIn(20))
    at = random.below(tokens.size());
  switch (random.below(8)) {
  case 0:
    tokens.erase(tokens.begin() + long(at));
    break;
  case 1:
    tokens.insert(tokens.begin() + long(at), tokens[at]);
    break;
  case 2:
    std::swap(tokens[at], tokens[random.below(tokens.size())]);
    break;
  case 3:
  case 4:
    tokens[at].text = tokens[at].kind == Token::Kind::Number && random.oneIn(2)
                          ? kNumbers[random.below(kNumbers.size())]
                          : similar(tokens, others, at, random);
    break;
  case 5: {
    auto [begin, end] = bracketed(tokens, random);
    tokens.erase(tokens.begin() + long(begin), tokens.begin() + long(end));
    break;
  }
  case 6: {
    auto [begin, end] = bracketed(tokens, random);
    const auto &from = others.empty() ? tokens : others;
    auto [first, last] = bracketed(from, random);
    std::vector<Token> part(from.begin() + long(first),
                            from.begin() + long(last));
    tokens.erase(tokens.begin() + long(begin), tokens.begin() + long(end));
    tokens.insert(tokens.begin() + long(begin), part.begin(), part.end());
    break;
  }
  default:
    return random.oneIn(4) ? nest(std::move(tokens), random)
                           : mutateLines(text, donor, random);
  }
  return join(tokens);
}

} // namespace

std::string mutateBytes(std::string text, Random &random) {
  for (size_t count = 1 + random.below(3); count > 0; --count) {
    size_t at = random.below(text.size() + 1);
    size_t length = std::min(1 + random.below(8), text.size() - at);
    switch (random.below(5)) {
    case 0:
      if (at < text.size())
        text[at] = char(text[at] ^ (1 << random.below(8)));
      break;
    case 1:
      if (at < text.size())
        text[at] = char(random.below(256));
      break;
    case 2:
      text.insert(at, 1 + random.below(4), char(random.below(256)));
      break;
    case 3:
      text.erase(at, random.oneIn(10) ? std::string::npos : length);
      break;
    default:
      text.insert(at, text.substr(at, length));
    }
  }
  return text;
}

std::string mutateText(std::string text, std::string_view donor,
                       Random &random) {
  for (size_t count = 1 + random.below(3); count > 0 && !text.empty(); --count)
    text = mutateTokens(text, donor, random);
  return text;
}

} // namespace fsdp::fuzz

// A sentence to its embedding, by an encoder that `relax-tune export` wrote under the name `encoder`; no Python.
//
//     relax-tune export minilm-c.rta --c encoder --name encoder
//     cmake -S encoder -B build && cmake --build build && cmake --install build --prefix "$PWD/installed"
//     export PKG_CONFIG_PATH=installed/lib/pkgconfig
//     g++ -std=c++17 embed.cpp $(pkg-config --cflags --libs encoder) -o embed
//     ./embed encoder/encoder.weights MODEL/vocab.txt "How does a compiler work?"
//
// It prints the numbers of the embedding, scaled to length 1, one a line.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "encoder.h"

using Vocabulary = std::unordered_map<std::string, std::int64_t>;

static Vocabulary read_vocabulary(const char *path) {
  Vocabulary found;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) found.emplace(line, static_cast<std::int64_t>(found.size()));
  return found;
}

// Words of letters and digits, and single marks, in lower case: BERT's words for ASCII text.
static std::vector<std::string> words_of(const std::string &text) {
  std::vector<std::string> words;
  bool open = false;
  for (unsigned char c : text) {
    if (std::isspace(c)) {
      open = false;
    } else if (std::ispunct(c)) {
      words.emplace_back(1, static_cast<char>(c));
      open = false;
    } else {
      if (!open) words.emplace_back();
      words.back() += static_cast<char>(std::tolower(c));
      open = true;
    }
  }
  return words;
}

// WordPiece (Schuster and Nakajima 2012): the longest piece of the vocabulary first, and so on with the rest.
static std::vector<std::int64_t> tokens_of(const Vocabulary &vocabulary, const std::string &text) {
  std::vector<std::int64_t> tokens{vocabulary.at("[CLS]")};
  for (const std::string &word : words_of(text)) {
    std::vector<std::int64_t> pieces;
    for (std::size_t at = 0; at < word.size();) {
      std::size_t end = word.size();
      auto found = vocabulary.end();
      for (; end > at && found == vocabulary.end(); --end)
        found = vocabulary.find((at > 0 ? "##" : "") + word.substr(at, end - at));
      if (found == vocabulary.end()) {
        pieces.assign(1, vocabulary.at("[UNK]"));
        break;
      }
      pieces.push_back(found->second);
      at = end + 1;
    }
    tokens.insert(tokens.end(), pieces.begin(), pieces.end());
  }
  tokens.push_back(vocabulary.at("[SEP]"));
  return tokens;
}

int main(int count, char **given) {
  if (count != 4) {
    std::fprintf(stderr, "usage: embed WEIGHTS VOCABULARY SENTENCE\n");
    return 2;
  }
  encoder_options options{};
  options.weights_file = given[1];
  encoder *opened = nullptr;
  const int failed = encoder_create(&opened, &options);
  const std::unique_ptr<encoder, decltype(&encoder_destroy)> model(opened, encoder_destroy);
  const Vocabulary vocabulary = read_vocabulary(given[2]);
  if (!failed && vocabulary.count("[CLS]") == 0) {
    std::fprintf(stderr, "%s: expected a vocabulary of WordPiece, got none\n", given[2]);
    return 2;
  }
  std::vector<float> embedding;
  int stopped = failed;
  if (!stopped) {
    const std::vector<std::int64_t> ids = tokens_of(vocabulary, given[3]), mask(ids.size(), 1);
    const std::int64_t symbols[] = {1, static_cast<std::int64_t>(ids.size())};
    std::size_t bytes = 0;
    stopped = encoder_output_bytes(model.get(), encoder_number_of_main, symbols, 0, &bytes);
    embedding.resize(bytes / sizeof(float));
    if (!stopped)
      stopped = encoder_call_main(model.get(), 1, symbols[1], ids.data(), mask.data(), embedding.data());
  }
  if (stopped) {
    std::fprintf(stderr, "error: %s\n", encoder_error(model.get()));
    return 1;
  }
  double length = 0;
  for (float x : embedding) length += static_cast<double>(x) * x;
  for (float x : embedding) std::printf("%.9g\n", x / std::sqrt(std::max(length, 1e-30)));
}

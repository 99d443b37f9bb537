// A block drafter: a thin model that reads taps of its target's residual stream and guesses a block of tokens at once
// (DFlash arXiv:2602.06036, DSpark). Its layers, norms and head are those of a Model; the rest is here.
//
// The keys and values of a position come from the target's taps there, long after the target has computed them: taps are
// kept until a draft or a full buffer asks for them, so that rejected rows cost nothing.
#pragma once
#include "model.h"

constexpr int MAX_BLOCK = 16;       // rows of a block, and of any other pass of a drafter, at most
constexpr int MAX_RANK = 1024;      // of the Markov head

struct Draft {  // one call: what to guess after, and where the guesses go
    int32_t anchor;
    double temperature;
    uint64_t seed;
    int32_t* tokens;      // (rows)
    float* confidence;    // (rows): chances that a guess is right if all before it are
    float* scores;        // (rows, candidates) or null: the final scores, for tests
    int32_t* candidates;  // the tokens they belong to, or null
};

struct DrafterShape {  // the C ABI's view of models/block_drafter.py
    int32_t hidden, rows, taps, draft_vocab, rank, candidates;
    int32_t coarse;  // activations of eight bits where the weights are Q8_0
    float eps;
};

struct Drafter : Model {  // a Model first, so that its tensors load as a model's do
    Drafter(const Model& target, const DrafterShape& shape, std::vector<int32_t> taps, std::vector<int32_t> tokens, std::vector<Layer> layers);

    Matrix* own_matrix(const char* name);
    std::vector<float>* own_vector(const char* name);
    int tap_of(int layer) const;  // which tap the output of a layer of the target is, or -1

    const DrafterShape shape;
    const std::vector<int32_t> taps, tokens;  // tokens: target ids by draft id, ascending
    Matrix fuse, prev, state, out;            // the last three are the Markov head's
    std::vector<float> tap_norm, context_norm, mask, confidence_y, confidence_m, confidence_p, confidence_b;

    std::vector<uint16_t> bias;  // (draft_vocab, rank) half precision: how the Markov head moves a token's logit, a unit of its state
    Stage fused;                 // (MAX_BLOCK, taps x the target's hidden)
    std::vector<float> logits;   // (rows, draft_vocab)
    std::vector<float> states;   // (rows, rank): what a row's own state adds to the Markov head
    struct Candidate { float score; int32_t id; };
    std::vector<Candidate> best;  // (rows, candidates), best first
};

// The drafter's side of a KV cache: keys and values up to `cache.length`, and the taps of the positions after it.
struct DraftState {
    DraftState(const Drafter& drafter, int capacity);

    Cache cache;
    int first = 0;            // positions before it have no keys: the text came from elsewhere
    int pending = 0;          // positions whose taps wait
    const int width;          // taps x the target's hidden
    std::vector<float> taps;  // (CHUNK, width)

    void rewind(int to);
    void restart(int length, int from);  // keys and values of positions [from, length) are there
};

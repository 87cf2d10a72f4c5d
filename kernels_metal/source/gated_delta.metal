// Gated delta rule along a tree of rows, behind rows of an earlier pass that are replayed first. A
// SIMD-group keeps one row of a head's state in registers, a lane EACH of its D numbers.
//
// q, k: [1, R, HK, D]. v: [1, R, HV, D]. decays, beta: [1, R, HV]. state: [1, HV, D, D]. taped_k,
// taped_decays, taped_deltas: of the earlier pass, as k, decays and deltas. orders: how
// many rows are replayed and how many orders follow these rows; an order is 4 times a row, plus 1 if
// it was done before, plus 2 if it begins from the state in front of all rows.
// y: [1, R, HV, D]. begun: the state behind the replayed rows. deltas: [1, R, HV, D], what the
// rows add to the state along their keys. A row is replayed by the same roundings as in its own
// pass, so that an answer does not depend on how its rows were drafted: a compiler chooses none.

constexpr int EACH = D / 32;

const int lane = thread_index_in_simdgroup;
const int row = thread_position_in_grid.y;
const int head = threadgroup_position_in_grid.z;
const int first = head / (HV / HK) * D + lane * EACH;  // of the lane's numbers in a row of keys
const int place = (head * D + row) * D + lane * EACH;
const int replayed = orders[0];

float now[EACH];
#pragma clang loop unroll(full)
for (int i = 0; i < EACH; ++i) {
  now[i] = state[place + i];
}
for (int at = 0; at < replayed; ++at) {
  const int from = orders[2 + at];
  const float decay = taped_decays[from * HV + head];
  const float delta = taped_deltas[(from * HV + head) * D + row];
  const device float* key = taped_k + from * HK * D + first;
#pragma clang loop unroll(full)
  for (int i = 0; i < EACH; ++i) {
    now[i] = fma(key[i], delta, now[i] * decay);
  }
}
float root[EACH];
#pragma clang loop unroll(full)
for (int i = 0; i < EACH; ++i) {
  root[i] = now[i];
  begun[place + i] = now[i];
}

float kept = 0.0f;  // the delta of row `lane`
for (int at = 0; at < orders[1]; ++at) {
  const int order = orders[2 + replayed + at];
  const int node = order >> 2;
  const bool is_new = (order & 1) == 0;
  const float decay = decays[node * HV + head];
  const device float* key = k + node * HK * D + first;
  float held = 0.0f;
#pragma clang loop unroll(full)
  for (int i = 0; i < EACH; ++i) {
    now[i] = ((order & 2) != 0 ? root[i] : now[i]) * decay;
    held += now[i] * key[i];
  }
  float delta = simd_shuffle(kept, node);
  if (is_new) {
    held = simd_sum(held);
    delta = (v[(node * HV + head) * D + row] - held) * beta[node * HV + head];
    kept = lane == node ? delta : kept;
  }
  float out = 0.0f;
  const device float* query = q + node * HK * D + first;
#pragma clang loop unroll(full)
  for (int i = 0; i < EACH; ++i) {
    now[i] = fma(key[i], delta, now[i]);
    out += now[i] * query[i];
  }
  if (is_new) {
    out = simd_sum(out);
    if (lane == 0) {
      y[(node * HV + head) * D + row] = T(out);
      deltas[(node * HV + head) * D + row] = delta;
    }
  }
}

// The path that the target's choices take through a prefix tree. One SIMD-group walks it: at each
// node the lanes look for the first child that carries the target's choice.
//
// choices, tokens, parents: [N] int. result: [N + 2] int: nodes on the path, the target's token
// after them, the path itself from the root on, -1 in the rest.

const int lane = thread_index_in_simdgroup;
const int nodes = choices_shape[0];

int node = 0;
int length = 1;
if (lane == 0) {
  result[2] = 0;
}
while (true) {
  const int wanted = choices[node];
  int child = nodes;
  for (int i = node + 1 + lane; i < nodes; i += 32) {
    if (parents[i] == node && tokens[i] == wanted) {
      child = i;
      break;
    }
  }
  child = simd_min(child);
  if (child == nodes) {
    break;
  }
  node = child;
  if (lane == 0) {
    result[2 + length] = node;
  }
  length += 1;
}
if (lane == 0) {
  result[0] = length;
  result[1] = choices[node];
}
for (int i = length + lane; i < nodes; i += 32) {
  result[2 + i] = -1;
}

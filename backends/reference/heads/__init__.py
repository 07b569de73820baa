"""Draft heads: small modules that read the target's hidden states. What they have in common is said here.

A head never owns state. The caller gives positions and an `attend` function that holds whatever keys and values it keeps:

    attend(layer, q, k, v) -> out
    q [..., heads, head_dim], k and v [..., kv_heads, head_dim], rotated; out [..., heads, head_dim]

`layer` counts the head's blocks from 0; `...` is any leading shape (flat rows [n] in the engine, [batch, n] in training), the same
for every argument of a call. `block.causal` is an `attend` over one or more whole sequences.

Alignment is the same for all of them: row t holds the target's hidden state of token t and the *embedding of token t + 1*, has
position t, and predicts token t + 2 (Medusa has no embedding: its head i predicts token t + 2 + i).
"""

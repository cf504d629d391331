"""Names and shapes of the golden checkpoints' tensors, by family, and the name of the LM head."""

Shapes = dict[str, tuple[int, ...]]


def llada(c: dict) -> tuple[Shapes, str]:
    d, mlp, vocab = c["d_model"], c["mlp_hidden_size"], c["embedding_size"]
    kv = c["n_kv_heads"] * d // c["n_heads"]
    root = "model.transformer."
    shapes: Shapes = {
        f"{root}wte.weight": (vocab, d),
        f"{root}ln_f.weight": (d,),
        f"{root}ff_out.weight": (vocab, d),
    }
    for i in range(c["n_layers"]):
        block = f"{root}blocks.{i}."
        for name, shape in (
            ("attn_norm", (d,)),
            ("ff_norm", (d,)),
            ("q_proj", (d, d)),
            ("k_proj", (kv, d)),
            ("v_proj", (kv, d)),
            ("attn_out", (d, d)),
            ("ff_proj", (mlp, d)),
            ("up_proj", (mlp, d)),
            ("ff_out", (d, mlp)),
        ):
            shapes[f"{block}{name}.weight"] = shape
    return shapes, f"{root}ff_out.weight"


def _mlp(root: str, d: int, size: int) -> Shapes:
    return {
        f"{root}gate_proj.weight": (size, d),
        f"{root}up_proj.weight": (size, d),
        f"{root}down_proj.weight": (d, size),
    }


def _around(c: dict, embedding: str = "embed_tokens") -> Shapes:
    """All but attention and MLP, in Qwen's layout."""
    d, vocab = c["hidden_size"], c["vocab_size"]
    shapes: Shapes = {
        f"model.{embedding}.weight": (vocab, d),
        "model.norm.weight": (d,),
        "lm_head.weight": (vocab, d),
    }
    for i in range(c["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{norm}.weight"] = (d,)
    return shapes


def _qwen_attention(c: dict, bias: bool, head_norms: bool) -> Shapes:
    d, shapes = c["hidden_size"], Shapes()
    head_dim = c.get("head_dim") or d // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    for i in range(c["num_hidden_layers"]):
        root = f"model.layers.{i}.self_attn."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{root}{name}_proj.weight"] = (rows, d)
            if bias:
                shapes[f"{root}{name}_proj.bias"] = (rows,)
        shapes[f"{root}o_proj.weight"] = (d, q)
        if head_norms:
            shapes[f"{root}q_norm.weight"] = shapes[f"{root}k_norm.weight"] = (head_dim,)
    return shapes


def _experts(root: str, c: dict, size: int) -> Shapes:
    d, shapes = c["hidden_size"], Shapes()
    shapes[f"{root}gate.weight"] = (c["num_experts"], d)
    for expert in range(c["num_experts"]):
        shapes |= _mlp(f"{root}experts.{expert}.", d, size)
    return shapes


def _dense(c: dict) -> Shapes:
    shapes = Shapes()
    for i in range(c["num_hidden_layers"]):
        shapes |= _mlp(f"model.layers.{i}.mlp.", c["hidden_size"], c["intermediate_size"])
    return shapes


def dream(c: dict) -> tuple[Shapes, str]:
    return _around(c) | _qwen_attention(c, bias=True, head_norms=False) | _dense(c), "lm_head.weight"


def llada_moe(c: dict) -> tuple[Shapes, str]:
    shapes = _around(c) | _qwen_attention(c, bias=False, head_norms=True)
    for i, mixed in enumerate(c["moe_layer_freq"]):
        root = f"model.layers.{i}.mlp."
        shapes |= (
            _experts(root, c, c["expert_intermediate_size"])
            if mixed
            else _mlp(root, c["hidden_size"], c["dense_intermediate_size"])
        )
    return shapes, "lm_head.weight"


def sdar(c: dict) -> tuple[Shapes, str]:
    return _around(c) | _qwen_attention(c, bias=False, head_norms=True) | _dense(c), "lm_head.weight"


def llada2(c: dict) -> tuple[Shapes, str]:
    shapes, d, head_dim = _around(c, "word_embeddings"), c["hidden_size"], c["head_dim"]
    size = c["moe_intermediate_size"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    for i in range(c["num_hidden_layers"]):
        root, mlp = f"model.layers.{i}.attention.", f"model.layers.{i}.mlp."
        shapes[f"{root}query_key_value.weight"] = ((heads + 2 * kv_heads) * head_dim, d)
        shapes[f"{root}dense.weight"] = (d, heads * head_dim)
        for norm in ("query_layernorm", "key_layernorm"):
            shapes[f"{root}{norm}.weight"] = (head_dim,)
        if i < c["first_k_dense_replace"]:
            shapes |= _mlp(mlp, d, c["intermediate_size"])
            continue
        shapes |= _experts(mlp, c, size) | _mlp(f"{mlp}shared_experts.", d, size * c["num_shared_experts"])
        shapes[f"{mlp}gate.expert_bias"] = (c["num_experts"],)
    return shapes, "lm_head.weight"


SHAPES = {"llada": llada, "dream": dream, "llada_moe": llada_moe, "sdar": sdar, "llada2": llada2}

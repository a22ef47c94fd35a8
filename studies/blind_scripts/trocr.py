"""TrOCR on drawn lines of text: a ViT encoder, a post-norm decoder with cross attention."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

VOCAB, BOS, PAD, EOS, FIRST_LETTER, IGNORED = 40, 0, 1, 2, 4, -100
HEIGHT, WIDTH, PATCH, GLYPH, BATCH = 16, 64, (8, 4), 6, 12
MAX_TARGET, POSITION_OFFSET = 12, 2
ENCODER = {"hidden_size": 48, "num_heads": 4, "num_layers": 3}
DECODER = {"d_model": 40, "num_heads": 5, "ffn_dim": 96, "num_layers": 2}
MASKED = -1e4


class ViTEmbeddings(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, hidden_size))
        self.patch_embeddings = nn.Conv2d(1, hidden_size, kernel_size=PATCH, stride=PATCH)
        num_positions = (HEIGHT // PATCH[0]) * (WIDTH // PATCH[1]) + 1
        self.position_embeddings = nn.Parameter(torch.zeros(1, num_positions, hidden_size))
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, pixel_values):
        embeddings = self.patch_embeddings(pixel_values).flatten(2).transpose(1, 2)
        cls_tokens = self.cls_token.expand(pixel_values.shape[0], -1, -1)
        embeddings = torch.cat((cls_tokens, embeddings), dim=1)
        return self.dropout(embeddings + self.position_embeddings)


class ViTAttention(nn.Module):
    """BEiT's: keys have no bias, it would change nothing."""

    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads, self.head_size = num_heads, hidden_size // num_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(args.dropout)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:2], self.num_heads, self.head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_probs = F.softmax(attention_scores / math.sqrt(self.head_size), dim=-1)
        context_layer = torch.matmul(self.dropout(attention_probs), value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).reshape(hidden_states.shape)
        return self.dropout(self.output(context_layer))


class ViTLayer(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.layernorm_before = nn.LayerNorm(hidden_size, eps=1e-6)
        self.attention = ViTAttention(hidden_size, num_heads)
        self.layernorm_after = nn.LayerNorm(hidden_size, eps=1e-6)
        self.intermediate = nn.Linear(hidden_size, 4 * hidden_size)
        self.output = nn.Linear(4 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.attention(self.layernorm_before(hidden_states))
        layer_output = F.gelu(self.intermediate(self.layernorm_after(hidden_states)))
        return hidden_states + self.dropout(self.output(layer_output))


class ViTModel(nn.Module):
    def __init__(self, hidden_size, num_heads, num_layers):
        super().__init__()
        self.embeddings = ViTEmbeddings(hidden_size)
        self.layer = nn.ModuleList(ViTLayer(hidden_size, num_heads) for _ in range(num_layers))
        self.layernorm = nn.LayerNorm(hidden_size, eps=1e-6)

    def forward(self, pixel_values):
        hidden_states = self.embeddings(pixel_values)
        for layer_module in self.layer:
            hidden_states = layer_module(hidden_states)
        return self.layernorm(hidden_states)


class TrOCRAttention(nn.Module):
    """Of the decoder; with ``kdim`` over the encoder's states, which may be wider or narrower."""

    def __init__(self, embed_dim, num_heads, kdim=None):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(kdim or embed_dim, embed_dim)
        self.v_proj = nn.Linear(kdim or embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(args.dropout)

    def _shape(self, tensor):
        bsz, seq_len, _ = tensor.shape
        tensor = tensor.view(bsz, seq_len, self.num_heads, self.head_dim).transpose(1, 2)
        return tensor.reshape(bsz * self.num_heads, seq_len, self.head_dim)

    def forward(self, hidden_states, key_value_states=None, attention_mask=None):
        bsz, tgt_len, embed_dim = hidden_states.shape
        source = hidden_states if key_value_states is None else key_value_states
        query_states = self._shape(self.q_proj(hidden_states) * self.scaling)
        key_states, value_states = (
            self._shape(self.k_proj(source)),
            self._shape(self.v_proj(source)),
        )
        attn_weights = torch.bmm(query_states, key_states.transpose(1, 2))
        if attention_mask is not None:
            attn_weights = attn_weights + attention_mask
        attn_probs = self.dropout(F.softmax(attn_weights, dim=-1))
        attn_output = torch.bmm(attn_probs, value_states)
        attn_output = attn_output.view(bsz, self.num_heads, tgt_len, self.head_dim)
        return self.out_proj(attn_output.transpose(1, 2).reshape(bsz, tgt_len, embed_dim))


class TrOCRDecoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, ffn_dim, encoder_size):
        super().__init__()
        self.self_attn = TrOCRAttention(d_model, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.encoder_attn = TrOCRAttention(d_model, num_heads, kdim=encoder_size)
        self.encoder_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, hidden_states, attention_mask, encoder_hidden_states):
        residual = hidden_states
        hidden_states = self.self_attn(hidden_states, attention_mask=attention_mask)
        hidden_states = self.self_attn_layer_norm(residual + self.dropout(hidden_states))
        residual = hidden_states
        hidden_states = self.encoder_attn(hidden_states, encoder_hidden_states)
        hidden_states = self.encoder_attn_layer_norm(residual + self.dropout(hidden_states))
        residual = hidden_states
        hidden_states = self.fc2(self.dropout(F.gelu(self.fc1(hidden_states))))
        return self.final_layer_norm(residual + self.dropout(hidden_states))


class TrOCRDecoder(nn.Module):
    def __init__(self, d_model, num_heads, ffn_dim, num_layers, encoder_size):
        super().__init__()
        self.embed_scale = math.sqrt(d_model)
        self.embed_tokens = nn.Embedding(VOCAB, d_model)
        self.embed_positions = nn.Embedding(MAX_TARGET + POSITION_OFFSET, d_model)
        self.layernorm_embedding = nn.LayerNorm(d_model)
        self.layers = nn.ModuleList(
            TrOCRDecoderLayer(d_model, num_heads, ffn_dim, encoder_size) for _ in range(num_layers)
        )
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, input_ids, encoder_hidden_states):
        length = input_ids.shape[1]
        positions = torch.arange(length).expand(input_ids.shape) + POSITION_OFFSET
        hidden_states = self.embed_tokens(input_ids) * self.embed_scale
        hidden_states = self.layernorm_embedding(hidden_states + self.embed_positions(positions))
        hidden_states = self.dropout(hidden_states)
        causal_mask = torch.triu(torch.full((length, length), MASKED), diagonal=1)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, causal_mask, encoder_hidden_states)
        return hidden_states


class VisionEncoderDecoderModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = ViTModel(**ENCODER)
        self.decoder = TrOCRDecoder(**DECODER, encoder_size=ENCODER["hidden_size"])
        self.output_projection = nn.Linear(DECODER["d_model"], VOCAB, bias=False)
        torch.manual_seed(1)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            nn.init.normal_(module.weight, std=0.08)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, ViTEmbeddings):
            nn.init.trunc_normal_(module.cls_token, std=0.02)
            nn.init.trunc_normal_(module.position_embeddings, std=0.02)

    def shift_tokens_right(self, labels):
        shifted = F.pad(labels[:, :-1], (1, 0), value=BOS)
        return shifted.masked_fill(shifted == IGNORED, PAD)

    def forward(self, pixel_values, labels):
        encoder_hidden_states = self.encoder(pixel_values)
        decoder_input_ids = self.shift_tokens_right(labels)
        return self.output_projection(self.decoder(decoder_input_ids, encoder_hidden_states))


def text_lines(g):
    """Each letter is a glyph. Lines are shifted, blurred by noise and of changing contrast."""
    glyphs = torch.rand(VOCAB, 10, GLYPH, generator=torch.Generator().manual_seed(5)) > 0.5
    pixel_values = torch.zeros(BATCH, 1, HEIGHT, WIDTH)
    labels = torch.full((BATCH, MAX_TARGET), IGNORED)
    for row in range(BATCH):
        length = int(torch.randint(4, 10, (1,), generator=g))
        text = torch.randint(FIRST_LETTER, VOCAB, (length,), generator=g)
        top, left = torch.randint(0, 6, (2,), generator=g).tolist()
        for i, letter in enumerate(text):
            at = left + i * GLYPH
            pixel_values[row, 0, top : top + 10, at : at + GLYPH] = glyphs[letter].float()
        labels[row, :length], labels[row, length] = text, EOS
    contrast = 0.5 + torch.rand(BATCH, 1, 1, 1, generator=g)
    noise = 0.2 * torch.randn(pixel_values.shape, generator=g)
    return (pixel_values * contrast + noise - 0.5) / 0.5, labels


net = VisionEncoderDecoderModel()
model = prepare(net, [*net.encoder.layer, *net.decoder.layers])
decay = [p for p in net.parameters() if p.ndim > 1]
no_decay = [p for p in net.parameters() if p.ndim <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}],
    lr=2e-3,
    eps=1e-6,
)
warmup, total = 2, 20
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: min((step + 1) / warmup, (total - step) / (total - warmup))
)
for parts in batches(text_lines):
    tokens = torch.stack([(labels != IGNORED).sum() for _, labels in parts]).sum()
    if world > 1:
        dist.all_reduce(tokens)
    for pixel_values, labels in parts:
        with autocast():
            logits = model(pixel_values, labels)
        loss = F.cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = loss * world / tokens
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()

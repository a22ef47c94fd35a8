"""LoRA on a Whisper-like recogniser: speech to text, low-rank adapters, the rest is frozen."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

VOCAB, SOT, EOT, IGNORE = 80, 0, 1, -100
MELS, FRAMES, TARGETS, BATCH = 16, 64, 14, 8
STATE, HEADS, ENCODER_LAYERS, DECODER_LAYERS, RANK, ALPHA = 48, 4, 2, 2, 4, 8


class WhisperAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, tensor):
        bsz, seq_len, _ = tensor.shape
        return tensor.view(bsz, seq_len, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, hidden_states, key_value_states=None, attention_mask=None):
        if key_value_states is None:
            key_value_states = hidden_states
        query_states = self._shape(self.q_proj(hidden_states) * self.scaling)
        key_states = self._shape(self.k_proj(key_value_states))
        value_states = self._shape(self.v_proj(key_value_states))
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3))
        if attention_mask is not None:
            attn_weights = attn_weights + attention_mask
        attn_weights = F.softmax(attn_weights, dim=-1)
        attn_output = torch.matmul(attn_weights, value_states)
        attn_output = attn_output.transpose(1, 2).reshape(hidden_states.shape)
        return self.out_proj(attn_output)


class WhisperEncoderLayer(nn.Module):
    def __init__(self, d_model, ffn_dim):
        super().__init__()
        self.self_attn = WhisperAttention(d_model, HEADS)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states = self.self_attn(hidden_states)
        hidden_states = residual + self.dropout(hidden_states)
        residual = hidden_states
        hidden_states = self.final_layer_norm(hidden_states)
        hidden_states = F.gelu(self.fc1(hidden_states))
        hidden_states = self.fc2(hidden_states)
        return residual + self.dropout(hidden_states)


class WhisperDecoderLayer(nn.Module):
    def __init__(self, d_model, ffn_dim):
        super().__init__()
        self.self_attn = WhisperAttention(d_model, HEADS)
        self.self_attn_layer_norm = nn.LayerNorm(d_model)
        self.encoder_attn = WhisperAttention(d_model, HEADS)
        self.encoder_attn_layer_norm = nn.LayerNorm(d_model)
        self.fc1 = nn.Linear(d_model, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, d_model)
        self.final_layer_norm = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, hidden_states, encoder_hidden_states, attention_mask):
        residual = hidden_states
        hidden_states = self.self_attn_layer_norm(hidden_states)
        hidden_states = self.self_attn(hidden_states, attention_mask=attention_mask)
        hidden_states = residual + self.dropout(hidden_states)
        residual = hidden_states
        hidden_states = self.encoder_attn_layer_norm(hidden_states)
        hidden_states = self.encoder_attn(hidden_states, encoder_hidden_states)
        hidden_states = residual + self.dropout(hidden_states)
        residual = hidden_states
        hidden_states = self.final_layer_norm(hidden_states)
        hidden_states = F.gelu(self.fc1(hidden_states))
        hidden_states = self.fc2(hidden_states)
        return residual + self.dropout(hidden_states)


def sinusoids(length, channels, max_timescale=10000):
    log_timescale_increment = math.log(max_timescale) / (channels // 2 - 1)
    inv_timescales = torch.exp(-log_timescale_increment * torch.arange(channels // 2))
    scaled_time = torch.arange(length)[:, None] * inv_timescales[None, :]
    return torch.cat([scaled_time.sin(), scaled_time.cos()], dim=1)


class WhisperEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(MELS, STATE, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(STATE, STATE, kernel_size=3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(FRAMES // 2, STATE)
        self.embed_positions.weight.data.copy_(sinusoids(FRAMES // 2, STATE))
        self.layers = nn.ModuleList(
            [WhisperEncoderLayer(STATE, 4 * STATE) for _ in range(ENCODER_LAYERS)]
        )
        self.layer_norm = nn.LayerNorm(STATE)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, input_features):
        inputs_embeds = F.gelu(self.conv1(input_features))
        inputs_embeds = F.gelu(self.conv2(inputs_embeds))
        hidden_states = inputs_embeds.permute(0, 2, 1) + self.embed_positions.weight
        hidden_states = self.dropout(hidden_states)
        for encoder_layer in self.layers:
            hidden_states = encoder_layer(hidden_states)
        return self.layer_norm(hidden_states)


class WhisperDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, STATE)
        self.embed_positions = nn.Embedding(TARGETS, STATE)
        self.layers = nn.ModuleList(
            [WhisperDecoderLayer(STATE, 4 * STATE) for _ in range(DECODER_LAYERS)]
        )
        self.layer_norm = nn.LayerNorm(STATE)
        self.dropout = nn.Dropout(args.dropout)
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        nn.init.normal_(self.embed_positions.weight, std=0.1)

    def forward(self, input_ids, encoder_hidden_states):
        length = input_ids.size(1)
        hidden_states = self.embed_tokens(input_ids) + self.embed_positions.weight[:length]
        hidden_states = self.dropout(hidden_states)
        attention_mask = torch.full((length, length), -1e4).triu(1)
        for decoder_layer in self.layers:
            hidden_states = decoder_layer(hidden_states, encoder_hidden_states, attention_mask)
        return self.layer_norm(hidden_states)


class WhisperForConditionalGeneration(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = WhisperEncoder()
        self.decoder = WhisperDecoder()
        self.proj_out = nn.Linear(STATE, VOCAB, bias=False)
        self.proj_out.weight = self.decoder.embed_tokens.weight

    def forward(self, input_features, decoder_input_ids):
        encoder_hidden_states = self.encoder(input_features)
        return self.proj_out(self.decoder(decoder_input_ids, encoder_hidden_states))


class LoraLinear(nn.Module):
    """A frozen layer, and beside it a product of two narrow ones."""

    def __init__(self, base_layer, r, lora_alpha):
        super().__init__()
        self.base_layer = base_layer
        self.scaling = lora_alpha / r
        self.lora_A = nn.Linear(base_layer.in_features, r, bias=False)
        self.lora_B = nn.Linear(r, base_layer.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        result = self.base_layer(x)
        return result + self.lora_B(self.lora_A(x)) * self.scaling


def get_peft_model(model, target_modules, modules_to_save):
    torch.manual_seed(17)
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if name.endswith(target_modules):
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], LoraLinear(module, RANK, ALPHA))
        if name in modules_to_save:
            module.requires_grad_(True)
    return model


def utterances(g):
    """A word is a chord of mel bands for some frames. Bands and frames are masked, as usual."""
    chords = torch.rand(VOCAB, MELS, generator=torch.Generator().manual_seed(23))
    features = 0.3 * torch.randn(BATCH, MELS, FRAMES, generator=g)
    labels = torch.full((BATCH, TARGETS), IGNORE)
    for row in range(BATCH):
        size = int(torch.randint(6, TARGETS, (1,), generator=g))
        words = torch.randint(2, VOCAB, (size,), generator=g)
        frames = chords[words].log().repeat_interleave(FRAMES // size, dim=0)
        features[row, :, : len(frames)] += frames.t()
        labels[row, :size], labels[row, size] = words, EOT
        band, frame = (int(torch.randint(0, n - 4, (1,), generator=g)) for n in (MELS, FRAMES))
        features[row, band : band + 2] = 0.0
        features[row, :, frame : frame + 4] = 0.0
    features = (features.clamp(min=-4.0) + 4.0) / 4.0
    decoder_input_ids = F.pad(labels[:, :-1], (1, 0), value=SOT)
    return features, decoder_input_ids.masked_fill(decoder_input_ids == IGNORE, EOT), labels


def label_smoothed_nll_loss(logits, labels, epsilon=0.1):
    log_probs = -F.log_softmax(logits.float(), dim=-1)
    padding_mask = labels.eq(IGNORE).unsqueeze(-1)
    nll_loss = log_probs.gather(dim=-1, index=labels.clamp(min=0).unsqueeze(-1))
    smoothed_loss = log_probs.sum(dim=-1, keepdim=True)
    nll_loss = nll_loss.masked_fill(padding_mask, 0.0).sum()
    smoothed_loss = smoothed_loss.masked_fill(padding_mask, 0.0).sum() / VOCAB
    return (1 - epsilon) * nll_loss + epsilon * smoothed_loss


net = WhisperForConditionalGeneration()
net = get_peft_model(net, ("q_proj", "v_proj"), ("decoder.layer_norm",))
model = prepare(net, [*net.encoder.layers, *net.decoder.layers])
trainable = [p for p in net.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=2e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
for parts in batches(utterances):
    num_tokens = torch.stack([(labels != IGNORE).sum() for *_, labels in parts]).sum()
    if world > 1:
        dist.all_reduce(num_tokens)
    for input_features, decoder_input_ids, labels in parts:
        with autocast():
            logits = model(input_features, decoder_input_ids)
        loss = label_smoothed_nll_loss(logits, labels) * world / num_tokens
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(trainable, 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()

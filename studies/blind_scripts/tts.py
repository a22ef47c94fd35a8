"""FastSpeech 2 in the manner of ming024's: FFT blocks, a variance adaptor, a post-net, masked losses."""

import math

import torch.nn.functional as F
from common import args, autocast, batches, dist, finish, nn, prepare, scaler, torch, world

PAD, PHONEMES, MELS, SOURCE, FRAMES, BINS = 0, 40, 20, 14, 48, 16


def get_mask_from_lengths(lengths, max_len):
    ids = torch.arange(max_len).unsqueeze(0)
    return ids >= lengths.unsqueeze(1)


def get_sinusoid_encoding_table(n_position, d_hid):
    position = torch.arange(n_position, dtype=torch.float32).unsqueeze(1)
    angle = position / torch.pow(10000.0, 2 * (torch.arange(d_hid) // 2) / d_hid)
    table = torch.zeros(n_position, d_hid)
    table[:, 0::2] = torch.sin(angle[:, 0::2])
    table[:, 1::2] = torch.cos(angle[:, 1::2])
    return table.unsqueeze(0)


class ScaledDotProductAttention(nn.Module):
    def __init__(self, temperature):
        super().__init__()
        self.temperature = temperature

    def forward(self, q, k, v, mask):
        attn = torch.bmm(q, k.transpose(1, 2))
        attn = attn / self.temperature
        attn = attn.masked_fill(mask, -1e4)
        attn = attn.softmax(dim=2)
        return torch.bmm(attn, v)


class MultiHeadAttention(nn.Module):
    def __init__(self, n_head, d_model):
        super().__init__()
        self.n_head, self.d_k = n_head, d_model // n_head
        self.w_qs = nn.Linear(d_model, d_model)
        self.w_ks = nn.Linear(d_model, d_model)
        self.w_vs = nn.Linear(d_model, d_model)
        self.attention = ScaledDotProductAttention(temperature=math.sqrt(self.d_k))
        self.layer_norm = nn.LayerNorm(d_model)
        self.fc = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(args.dropout)

    def split_heads(self, x):
        sz_b, length, _ = x.size()
        x = x.view(sz_b, length, self.n_head, self.d_k)
        return x.permute(2, 0, 1, 3).contiguous().view(-1, length, self.d_k)

    def forward(self, x, mask):
        sz_b, length, _ = x.size()
        residual = x
        q = self.split_heads(self.w_qs(x))
        k = self.split_heads(self.w_ks(x))
        v = self.split_heads(self.w_vs(x))
        output = self.attention(q, k, v, mask.repeat(self.n_head, 1, 1))
        output = output.view(self.n_head, sz_b, length, self.d_k)
        output = output.permute(1, 2, 0, 3).contiguous().view(sz_b, length, -1)
        output = self.dropout(self.fc(output))
        return self.layer_norm(output + residual)


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_in, d_hid, kernel_size):
        super().__init__()
        self.w_1 = nn.Conv1d(
            d_in, d_hid, kernel_size=kernel_size[0], padding=(kernel_size[0] - 1) // 2
        )
        self.w_2 = nn.Conv1d(
            d_hid, d_in, kernel_size=kernel_size[1], padding=(kernel_size[1] - 1) // 2
        )
        self.layer_norm = nn.LayerNorm(d_in)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x):
        residual = x
        output = x.transpose(1, 2)
        output = self.w_2(F.relu(self.w_1(output)))
        output = self.dropout(output.transpose(1, 2))
        return self.layer_norm(output + residual)


class FFTBlock(nn.Module):
    def __init__(self, d_model, n_head, d_inner, kernel_size=(9, 1)):
        super().__init__()
        self.slf_attn = MultiHeadAttention(n_head, d_model)
        self.pos_ffn = PositionwiseFeedForward(d_model, d_inner, kernel_size)

    def forward(self, enc_input, mask, slf_attn_mask):
        enc_output = self.slf_attn(enc_input, slf_attn_mask)
        enc_output = enc_output.masked_fill(mask.unsqueeze(-1), 0)
        enc_output = self.pos_ffn(enc_output)
        return enc_output.masked_fill(mask.unsqueeze(-1), 0)


class Encoder(nn.Module):
    def __init__(self, d_model, n_layers=2):
        super().__init__()
        self.src_word_emb = nn.Embedding(PHONEMES, d_model, padding_idx=PAD)
        self.register_buffer("position_enc", get_sinusoid_encoding_table(SOURCE + 1, d_model))
        self.layer_stack = nn.ModuleList(FFTBlock(d_model, 2, 96) for _ in range(n_layers))

    def forward(self, src_seq, mask):
        max_len = src_seq.shape[1]
        slf_attn_mask = mask.unsqueeze(1).expand(-1, max_len, -1)
        enc_output = self.src_word_emb(src_seq) + self.position_enc[:, :max_len]
        for enc_layer in self.layer_stack:
            enc_output = enc_layer(enc_output, mask, slf_attn_mask)
        return enc_output


class Decoder(nn.Module):
    def __init__(self, d_model, n_layers=2):
        super().__init__()
        self.register_buffer("position_enc", get_sinusoid_encoding_table(FRAMES + 1, d_model))
        self.layer_stack = nn.ModuleList(FFTBlock(d_model, 2, 96) for _ in range(n_layers))

    def forward(self, enc_seq, mask):
        max_len = enc_seq.shape[1]
        slf_attn_mask = mask.unsqueeze(1).expand(-1, max_len, -1)
        dec_output = enc_seq + self.position_enc[:, :max_len]
        for dec_layer in self.layer_stack:
            dec_output = dec_layer(dec_output, mask, slf_attn_mask)
        return dec_output


class Conv(nn.Module):
    """A convolution over time of channels-last sequences."""

    def __init__(self, in_channels, out_channels, kernel_size):
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel_size, padding=kernel_size // 2)

    def forward(self, x):
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class VariancePredictor(nn.Module):
    def __init__(self, d_model, filter_size=48, kernel=3):
        super().__init__()
        self.conv1d_1 = Conv(d_model, filter_size, kernel)
        self.layer_norm_1 = nn.LayerNorm(filter_size)
        self.conv1d_2 = Conv(filter_size, filter_size, kernel)
        self.layer_norm_2 = nn.LayerNorm(filter_size)
        self.dropout = nn.Dropout(args.dropout)
        self.linear_layer = nn.Linear(filter_size, 1)

    def forward(self, x, mask):
        x = self.dropout(self.layer_norm_1(F.relu(self.conv1d_1(x))))
        x = self.dropout(self.layer_norm_2(F.relu(self.conv1d_2(x))))
        return self.linear_layer(x).squeeze(-1).masked_fill(mask, 0.0)


class LengthRegulator(nn.Module):
    """Repeats each phoneme's vector as many times as it has frames."""

    def forward(self, x, duration, max_len):
        ends = duration.cumsum(dim=1)
        frames = torch.arange(max_len)[None, :, None]
        index = (frames >= ends[:, None, :]).sum(dim=-1)
        index = index.clamp(max=x.size(1) - 1)
        output = torch.gather(x, 1, index.unsqueeze(-1).expand(-1, -1, x.size(-1)))
        return output, duration.sum(dim=1)


class VarianceAdaptor(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.duration_predictor = VariancePredictor(d_model)
        self.length_regulator = LengthRegulator()
        self.pitch_predictor = VariancePredictor(d_model)
        self.energy_predictor = VariancePredictor(d_model)
        self.register_buffer("pitch_bins", torch.linspace(-2.0, 2.0, BINS - 1))
        self.register_buffer("energy_bins", torch.linspace(-1.0, 3.0, BINS - 1))
        self.pitch_embedding = nn.Embedding(BINS, d_model)
        self.energy_embedding = nn.Embedding(BINS, d_model)

    def forward(self, x, src_mask, duration, pitch, energy):
        log_duration_prediction = self.duration_predictor(x, src_mask)
        pitch_prediction = self.pitch_predictor(x, src_mask)
        x = x + self.pitch_embedding(torch.bucketize(pitch, self.pitch_bins))
        energy_prediction = self.energy_predictor(x, src_mask)
        x = x + self.energy_embedding(torch.bucketize(energy, self.energy_bins))
        x, mel_len = self.length_regulator(x, duration, FRAMES)
        mel_mask = get_mask_from_lengths(mel_len, FRAMES)
        return x, pitch_prediction, energy_prediction, log_duration_prediction, mel_mask


class PostNet(nn.Module):
    def __init__(self, channels=32, n_convolutions=3):
        super().__init__()
        widths = [MELS] + [channels] * (n_convolutions - 1) + [MELS]
        self.convolutions = nn.ModuleList(
            Conv(widths[i], widths[i + 1], 5) for i in range(n_convolutions)
        )

    def forward(self, x):
        for convolution in self.convolutions[:-1]:
            x = torch.tanh(convolution(x))
        return self.convolutions[-1](x)


class FastSpeech2(nn.Module):
    def __init__(self, d_model=48):
        super().__init__()
        self.encoder = Encoder(d_model)
        self.variance_adaptor = VarianceAdaptor(d_model)
        self.decoder = Decoder(d_model)
        self.mel_linear = nn.Linear(d_model, MELS)
        self.postnet = PostNet()

    def forward(self, texts, src_lens, durations, pitches, energies):
        src_mask = get_mask_from_lengths(src_lens, SOURCE)
        output = self.encoder(texts, src_mask)
        output, p, e, log_d, mel_mask = self.variance_adaptor(
            output, src_mask, durations, pitches, energies
        )
        output = self.decoder(output, mel_mask)
        output = self.mel_linear(output)
        postnet_output = self.postnet(output) + output
        return output, postnet_output, p, e, log_d, src_mask, mel_mask


class FastSpeech2Loss(nn.Module):
    """Sums over what is not padding, divided by how much of it the whole batch has."""

    def forward(self, predictions, mel_targets, pitches, energies, durations, counts):
        mel, postnet_mel, p, e, log_d, src_mask, mel_mask = predictions
        src_valid, mel_valid = ~src_mask, ~mel_mask.unsqueeze(-1)
        log_duration_targets = torch.log(durations.float() + 1)
        mel_loss = ((mel.float() - mel_targets).abs() * mel_valid).sum()
        postnet_loss = ((postnet_mel.float() - mel_targets).abs() * mel_valid).sum()
        pitch_loss = ((p.float() - pitches).square() * src_valid).sum()
        energy_loss = ((e.float() - energies).square() * src_valid).sum()
        duration_loss = ((log_d.float() - log_duration_targets).square() * src_valid).sum()
        spectrum = (mel_loss + postnet_loss) / (counts[1] * MELS)
        return spectrum + (duration_loss + pitch_loss + energy_loss) / counts[0]


def collate(g):
    texts = torch.randint(1, PHONEMES, (8, SOURCE), generator=g)
    src_lens = torch.randint(8, SOURCE + 1, (8,), generator=g)
    padding = get_mask_from_lengths(src_lens, SOURCE)
    texts = texts.masked_fill(padding, PAD)
    durations = torch.randint(1, 4, (8, SOURCE), generator=g).masked_fill(padding, 0)
    pitches = torch.randn(8, SOURCE, generator=g).masked_fill(padding, 0.0)
    energies = (torch.randn(8, SOURCE, generator=g) + 1).masked_fill(padding, 0.0)
    mels = torch.randn(8, FRAMES, MELS, generator=g) - 4
    frames = get_mask_from_lengths(durations.sum(1), FRAMES)
    mels = mels.masked_fill(frames.unsqueeze(-1), 0.0)
    return texts, src_lens, mels, pitches, energies, durations


net = FastSpeech2()
model = prepare(net, [*net.encoder.layer_stack, *net.decoder.layer_stack])
criterion = FastSpeech2Loss()
optimizer = torch.optim.Adam(
    model.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0
)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer,
    lambda step: 48**-0.5 * min((step + 1) ** -0.5, (step + 1) * 200**-1.5),
)
for parts in batches(collate):
    counts = torch.tensor(
        [sum(int(part[1].sum()) for part in parts), sum(int(part[5].sum()) for part in parts)]
    )
    if world > 1:
        dist.all_reduce(counts)
    for texts, src_lens, mels, pitches, energies, durations in parts:
        with autocast():
            predictions = model(texts, src_lens, durations, pitches, energies)
        loss = criterion(predictions, mels, pitches, energies, durations, counts) * world
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()
    optimizer.zero_grad()
finish()

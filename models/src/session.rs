//! Running a decoder: caches, buffers, and the forward pass.

use std::ops::{Deref, Range};

use abi::DType;

use super::Model;
use super::config::{DecoderConfig, ModelConfig};
use super::decoder::{DecoderBlock, LogitArgs, Observer};
use super::layers::{Cache, CacheType, Group, GroupPhase, Keys, Phase, Span, Step, Visible};
use super::recording::Recording;
use super::vision::{Visual, VisualInputs};
use host::Error;
use host::OptimizationReport;
use host::Stream;
use host::nvtx;
use host::ops::rope::RopeTables;
use host::{Tensor, TensorView};

const OP: &str = "Session";

/// The sizes of a session. All memory is taken when it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionOptions {
    /// Sequences that are decoded together.
    pub batch: usize,
    /// Most tokens of a sequence, prompt and continuation together: the size of its cache.
    pub capacity: usize,
    /// Tokens of a prompt that run at a time; a longer prompt runs in pieces. A small chunk takes less memory for what
    /// is between the layers, but leaves a large card idle: at 512 tokens an H200 has a tile of a product for half of
    /// its multiprocessors.
    pub chunk: usize,
    /// Which rows of logits a prefill gives.
    pub logits: Logits,
    /// Most patches of the images and videos of a prompt; 0 for text alone, which takes no memory for a vision tower.
    pub max_patches: usize,
    /// What keys and values are stored as.
    pub cache_type: CacheType,
}

impl Default for SessionOptions {
    fn default() -> Self {
        SessionOptions {
            batch: 1,
            capacity: 2048,
            chunk: 2048,
            logits: Logits::Last,
            max_patches: 0,
            cache_type: CacheType::Model,
        }
    }
}

impl SessionOptions {
    /// Whether a model of this configuration can have such a session, but for the memory: to be asked before it is
    /// loaded.
    ///
    /// **Errors**: [`Error::Invalid`] that names the field.
    pub fn check(&self, config: &ModelConfig) -> Result<(), Error> {
        let &SessionOptions { batch, capacity, chunk, max_patches, .. } = self;
        for (argument, size) in [("batch", batch), ("capacity", capacity), ("chunk", chunk)] {
            if size == 0 {
                return Err(Error::invalid(OP, argument, "at least 1", "0"));
            }
        }
        // Slots are counted in 32 bits.
        if batch.saturating_mul(capacity) >= 1 << 31 {
            let got = format!("{batch} · {capacity}");
            return Err(Error::invalid(OP, "capacity", "batch · capacity below 2^31", got));
        }
        // They are attention's queries.
        if max_patches >= 1 << 30 {
            return Err(Error::invalid(OP, "max_patches", "below 2^30", max_patches.to_string()));
        }
        if max_patches > 0 && config.vision.is_none() {
            let expected = "0 for a model without a vision tower";
            return Err(Error::invalid(OP, "max_patches", expected, max_patches.to_string()));
        }
        Ok(())
    }
}

/// Which rows of logits a prefill computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// That of the last token.
    Last,
    /// Those of all tokens of a chunk, which cost `chunk · vocab · 4` bytes.
    All,
}

/// A batch of sequences in the making: their caches, the buffers of a forward pass, and the planned operators.
#[derive(Debug)]
pub struct Session {
    model: Model,
    options: SessionOptions,
    stream: Stream,
    prefill: DecoderBlock,
    decode: DecoderBlock,
    /// The recorded decode step, once there is one.
    decode_graph: Recording,
    ropes: RopeTables,
    /// If it takes images and videos.
    visual: Option<VisualInputs>,
    /// Of each layer.
    caches: Vec<Cache>,
    inputs: Inputs,
    /// `[rows, vocab]` f32.
    logits: Tensor,
    /// Tokens in the caches, per sequence.
    lens: Vec<usize>,
    /// Per sequence, ascending: tokens from which on positions are behind the number of the token, and by how much. An
    /// image has more tokens than it takes positions.
    shifts: Vec<Vec<(usize, usize)>>,
    /// Per sequence: its caches are not those of its tokens, since a call that writes to them has not come to its end.
    torn: Vec<bool>,
    /// Rows of the logits buffer that the last call gave.
    logit_rows: Range<usize>,
    /// The sequence that they are of, if the last call was for one alone.
    prefilled: Option<usize>,
}

/// Rows of logits on the device, `[rows, vocab]` f32: a view, with the stream that it can be read by.
#[derive(Clone, Copy, Debug)]
pub struct LogitRows<'a> {
    view: TensorView<'a>,
    stream: &'a Stream,
}

impl<'a> LogitRows<'a> {
    pub(super) fn new(view: TensorView<'a>, stream: &'a Stream) -> Self {
        LogitRows { view, stream }
    }

    /// The rows.
    pub fn view(&self) -> TensorView<'a> {
        self.view
    }

    /// Their elements, row after row; waits for them.
    pub fn to_host(&self) -> Result<Vec<f32>, Error> {
        self.view.to_vec(self.stream)
    }
}

impl<'a> Deref for LogitRows<'a> {
    type Target = TensorView<'a>;
    fn deref(&self) -> &TensorView<'a> {
        &self.view
    }
}

impl Session {
    pub(super) fn new(model: Model, options: SessionOptions) -> Result<Self, Error> {
        let SessionOptions { batch, capacity, chunk, logits, max_patches, cache_type } = options;
        options.check(model.config())?;
        cache_type.check(OP, model.own_decoder(), model.dtype())?;
        let chunk = chunk.min(capacity);
        let options = SessionOptions { chunk, ..options };
        let config = model.own_decoder();
        let &DecoderConfig { vocab_size, .. } = config;
        let (stream, dtype) = (model.device().stream()?, model.dtype());
        let prefill_rows = match logits {
            Logits::Last => 1,
            Logits::All => chunk,
        };
        let block = |sequences: usize, seq: usize, logit_rows| {
            let tokens = sequences * seq;
            let (ragged, page_tokens, pages) = (false, None, 0);
            let shares = false;
            let group = GroupPhase { sequences, seq, tokens, ragged, capacity, page_tokens, pages, shares };
            let (stream, groups) = (&stream, &[group]);
            let (rank, sizes, chooses) = (model.rank(), [].as_slice(), false);
            let phase = Phase {
                stream,
                config,
                dtype,
                cache_type,
                activations: model.activations(),
                tokens,
                sizes,
                groups,
                logit_rows,
                chooses,
                rank,
                adapters: None,
            };
            DecoderBlock::new(&phase, model.decoder())
        };
        let (prefill, decode) = (block(1, chunk, prefill_rows)?, block(batch, 1, batch)?);
        let caches = config
            .layers
            .iter()
            .map(|layer| Cache::new(&layer.mixer, &stream, (dtype, cache_type), [batch, capacity], batch))
            .collect::<Result<_, _>>()?;
        let inputs = Inputs::new(&stream, chunk.max(batch + 1))?;
        let logits = Tensor::empty(&stream, &[prefill_rows.max(batch), vocab_size], DType::F32)?;
        let rope = &config.rope;
        let ropes = RopeTables::new(&stream, &rope.inv_freq()?, rope.attention_factor(), capacity)?;
        let visual = match &model.config().vision {
            _ if max_patches == 0 => None,
            Some(vision) => Some(VisualInputs::new(&stream, (vision, config), dtype, max_patches, chunk)?),
            None => None,
        };
        let decode_graph = Recording::new(model.device());
        let lens = vec![0; batch];
        Ok(Session {
            model,
            options,
            stream,
            prefill,
            decode,
            decode_graph,
            ropes,
            visual,
            caches,
            inputs,
            logits,
            lens,
            shifts: vec![Vec::new(); batch],
            torn: vec![false; batch],
            logit_rows: 0..0,
            prefilled: None,
        })
    }

    /// Its model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The stream that all work of the session runs on.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Its sizes.
    pub fn options(&self) -> SessionOptions {
        self.options
    }

    /// Tokens in the cache of a sequence.
    pub fn len(&self, sequence: usize) -> usize {
        self.lens.get(sequence).copied().unwrap_or(0)
    }

    /// Whether no sequence has any tokens.
    pub fn is_empty(&self) -> bool {
        self.lens.iter().all(|&len| len == 0)
    }

    /// Bytes of the caches, for all sequences.
    pub fn cache_bytes(&self) -> usize {
        self.caches.iter().map(Cache::bytes).sum()
    }

    /// Forgets the tokens of a sequence from `len` on; a length beyond its own changes nothing. What follows an image
    /// that is cut by it is treated as text in the place of the image's rest. The state of a delta net can only forget
    /// all of them: an error for other lengths, where [`Self::fork`] is the way to go back.
    ///
    /// A length of 0 always makes a sequence as good as new, also one that a call left half-way.
    pub fn truncate(&mut self, sequence: usize, len: usize) -> Result<(), Error> {
        self.check_sequence("sequence", sequence)?;
        if len > 0 {
            let current = self.whole_len("sequence", sequence)?;
            if len >= current {
                return Ok(());
            }
            if self.is_recurrent() {
                let expected = format!("0 or {current}: a recurrent state cannot be cropped");
                return Err(Error::invalid(OP, "len", expected, len.to_string()));
            }
        } else {
            self.torn[sequence] = true;
            for cache in &mut self.caches {
                cache.clear(&self.stream, sequence)?;
            }
            self.torn[sequence] = false;
        }
        self.lens[sequence] = len;
        self.shifts[sequence].retain(|&(from, _)| from <= len);
        Ok(())
    }

    /// Makes sequence `to` what sequence `from` is, so that both go on from there. Copies what there is of its tokens,
    /// not the whole capacity.
    pub fn fork(&mut self, from: usize, to: usize) -> Result<(), Error> {
        let len = self.whole_len("from", from)?;
        self.check_sequence("to", to)?;
        if from != to {
            self.torn[to] = true;
            for cache in &mut self.caches {
                cache.copy_sequence(&self.stream, (from, to), len)?;
            }
            self.torn[to] = false;
            self.lens[to] = len;
            self.shifts[to] = self.shifts[from].clone();
        }
        Ok(())
    }

    fn check_sequence(&self, argument: &'static str, sequence: usize) -> Result<(), Error> {
        if sequence < self.options.batch {
            return Ok(());
        }
        let expected = format!("a sequence below {}", self.options.batch);
        Err(Error::invalid(OP, argument, expected, sequence.to_string()))
    }

    /// Tokens of a sequence; an error if its caches are of others.
    fn whole_len(&self, argument: &'static str, sequence: usize) -> Result<usize, Error> {
        self.check_sequence(argument, sequence)?;
        if self.torn[sequence] {
            let expected = "a sequence that no failed call left half-way: truncate it to 0 first";
            return Err(Error::invalid(OP, argument, expected, sequence.to_string()));
        }
        Ok(self.lens[sequence])
    }

    /// Whether what a failed call wrote cannot be left out of account.
    fn is_recurrent(&self) -> bool {
        !self.caches.iter().all(Cache::can_be_cropped)
    }

    /// What the operators chose, for the vision tower if there is one, for prefill and for decode.
    pub fn optimization_reports(&self) -> [(&'static str, Vec<OptimizationReport>); 3] {
        let visual = self.visual.as_ref().map_or(Vec::new(), VisualInputs::reports);
        [("vision", visual), ("prefill", self.prefill.reports()), ("decode", self.decode.reports())]
    }

    /// Appends a prompt, or a part of one, to a sequence. Returns the logits of its last token, `[1, vocab]` f32, which
    /// stay until the next call.
    ///
    /// All of the prompt is appended, or nothing: after an error the sequence has the tokens that it had before, while
    /// the logits of the call before may be gone. Only a recurrent state cannot go back. A sequence of a model with
    /// delta nets that was left half-way is refused, by this, by [`Self::decode`] and as what [`Self::fork`] copies,
    /// until it is truncated to 0 or another is copied over it.
    pub fn prefill(&mut self, sequence: usize, ids: &[u32]) -> Result<LogitRows<'_>, Error> {
        self.prefill_visual(sequence, ids, &[])
    }

    /// Like [`Self::prefill`], showing inner tensors to `observe`, and logits `[rows, vocab]` to `logits`, with the
    /// index in `ids` of the token that their first row is of: those of each chunk in turn under [`Logits::All`], those
    /// of the prompt's last token, once, under [`Logits::Last`]. An error of either is one of the call.
    pub fn prefill_with(
        &mut self,
        sequence: usize,
        ids: &[u32],
        observe: &mut Observer<'_>,
        logits: &mut dyn FnMut(usize, TensorView<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.prefill_visual_with(sequence, ids, &[], observe, logits)
    }

    /// Like [`Self::prefill`], for a prompt with images and videos in order of their appearance.
    ///
    /// An image has a placeholder token for each group of patches that become one, in a row, and so has each frame of a
    /// video: see [`VisionConfig::image_token`](super::VisionConfig::image_token). One without an image is an error.
    pub fn prefill_visual(
        &mut self,
        sequence: usize,
        ids: &[u32],
        visuals: &[Visual<'_>],
    ) -> Result<LogitRows<'_>, Error> {
        self.prefill_visual_with(sequence, ids, visuals, &mut |_, _| Ok(()), &mut |_, _| Ok(()))?;
        self.logits()
    }

    /// [`Self::prefill_visual`] and [`Self::prefill_with`] in one.
    pub fn prefill_visual_with(
        &mut self,
        sequence: usize,
        ids: &[u32],
        visuals: &[Visual<'_>],
        observe: &mut Observer<'_>,
        logits: &mut dyn FnMut(usize, TensorView<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let _range = nvtx::range("prefill");
        self.model.config().decoder.check_ids(ids)?;
        let len = self.whole_len("sequence", sequence)?;
        if ids.is_empty() {
            return Err(Error::invalid(OP, "ids", "at least one token", "none"));
        }
        self.check_room(sequence, ids.len())?;
        let shift = self.shift(sequence);
        let prompt = match (&mut self.visual, self.model.tower()) {
            _ if visuals.is_empty() => {
                self.check_is_text(ids)?;
                None
            }
            (Some(visual), Some(tower)) => {
                let prompt = visual.place(ids, visuals, (len, shift))?;
                visual.encode(&self.stream, tower, visuals)?;
                Some(prompt)
            }
            _ => {
                let expected = "none in a session without max_patches";
                return Err(Error::invalid(OP, "visuals", expected, visuals.len().to_string()));
            }
        };
        let SessionOptions { chunk, capacity, .. } = self.options;
        let num_chunks = ids.len().div_ceil(chunk);
        // Keys and values beyond a length are not read, so it is enough to keep that until all has gone well.
        self.torn[sequence] = self.is_recurrent();
        let mut last_row = 0..0;
        self.logit_rows = 0..0;
        for (index, part) in ids.chunks(chunk).enumerate() {
            let start = len + index * chunk;
            let tokens = part.len();
            let positions = start..start + tokens;
            let slots = positions.clone().map(|position| sequence * capacity + position);
            let positions = positions.map(|position| (position - shift) as u32);
            self.inputs.set(&self.stream, part, positions, slots, &[], sequence..sequence + 1)?;
            let is_last = index + 1 == num_chunks;
            let logit_rows = match self.options.logits {
                Logits::All => tokens,
                Logits::Last if is_last => 1,
                Logits::Last => 0,
            };
            let rows = match (&prompt, &mut self.visual) {
                (Some(prompt), Some(visual)) => {
                    let own = index * chunk..index * chunk + tokens;
                    let features = prompt.features(own.clone());
                    let placed = prompt.visual_tokens()[features.clone()].iter();
                    let placed: Vec<u32> = placed.map(|token| (token - own.start) as u32).collect();
                    let axes = &prompt.axes()[own];
                    Some(visual.rows_of(&self.stream, axes, (&placed, features))?)
                }
                _ => None,
            };
            let (ropes, positions) = match &rows {
                Some(rows) => (rows.ropes, rows.positions),
                None => (&self.ropes, self.inputs.row(POSITIONS, tokens)?),
            };
            let keys = start + tokens;
            let group = Group {
                rows: 0..tokens,
                sequences: 1,
                ragged: false,
                states: self.inputs.row(SEQUENCES, 1)?,
                offsets: self.inputs.row(OFFSETS, 2)?,
                keys: Keys::Rows { sequences: sequence..sequence + 1, visible: Visible::Uniform(keys) },
                spans: &[Span { rows: 0..tokens, keys }],
            };
            let step = Step {
                stream: &self.stream,
                ropes,
                tokens,
                ids: self.inputs.row(IDS, tokens)?,
                positions,
                slots: self.inputs.row(SLOTS, tokens)?,
                groups: &[Some(group)],
                visual: rows.as_ref(),
                adapted: None,
            };
            let out = match logit_rows {
                0 => None,
                rows => Some(LogitArgs { tokens: None, out: self.logits.view_mut().slice(0, 0..rows)? }),
            };
            self.prefill.run(&step, self.model.decoder(), &mut self.caches, out, Some(observe))?;
            if logit_rows > 0 {
                last_row = logit_rows - 1..logit_rows;
                let rows = self.logits.view().slice(0, 0..logit_rows)?;
                logits(index * chunk + tokens - logit_rows, rows)?;
            }
        }
        self.torn[sequence] = false;
        self.lens[sequence] += ids.len();
        if let Some(prompt) = &prompt {
            self.shifts[sequence].extend(prompt.shifts(len + 1..len + ids.len() + 1));
        }
        self.logit_rows = last_row;
        self.prefilled = Some(sequence);
        Ok(())
    }

    /// Appends one token to every sequence. Returns their logits, `[batch, vocab]` f32, which stay until the next call.
    ///
    /// All sequences take part, or none: one whose cache is full is an error that names it. When a sequence is at its
    /// end and others go on, truncate it, to 0 or by a token at a time, give it any token, and pass over its row of
    /// logits.
    ///
    /// A placeholder of an image is text here. An error leaves the sequences as one of [`Self::prefill`] does.
    pub fn decode(&mut self, ids: &[u32]) -> Result<LogitRows<'_>, Error> {
        self.decode_step(ids, None)
    }

    /// Like [`Self::decode`], showing inner tensors to `observe`. Such a step is never a recorded one, so it takes
    /// longer on a card; and there its norms and sums are launches of their own, so last bits may differ.
    pub fn decode_with(&mut self, ids: &[u32], observe: &mut Observer<'_>) -> Result<LogitRows<'_>, Error> {
        self.decode_step(ids, Some(observe))
    }

    fn decode_step(
        &mut self,
        ids: &[u32],
        observe: Option<&mut Observer<'_>>,
    ) -> Result<LogitRows<'_>, Error> {
        let _range = nvtx::range("decode");
        let SessionOptions { batch, capacity, .. } = self.options;
        if ids.len() != batch {
            let got = ids.len().to_string();
            return Err(Error::invalid(OP, "ids", format!("one token for each of {batch} sequences"), got));
        }
        self.model.config().decoder.check_ids(ids)?;
        for sequence in 0..batch {
            self.whole_len("sequence", sequence)?;
            self.check_room(sequence, 1)?;
        }
        let lens: Vec<u32> = self.lens.iter().map(|&len| len as u32 + 1).collect();
        let position = |(sequence, &len): (usize, &usize)| (len - self.shift(sequence)) as u32;
        let positions: Vec<u32> = self.lens.iter().enumerate().map(position).collect();
        let slots: Vec<usize> =
            self.lens.iter().enumerate().map(|(sequence, &len)| sequence * capacity + len).collect();
        self.inputs.set(&self.stream, ids, positions.into_iter(), slots.into_iter(), &lens, 0..batch)?;
        let is_recurrent = self.is_recurrent();
        self.torn.fill(is_recurrent);
        self.logit_rows = 0..0;
        let mut run = |stream: &Stream, observe: Option<&mut Observer<'_>>| {
            let visible = Visible::PerSequence(self.inputs.row(LENS, batch)?);
            let group = Group {
                rows: 0..batch,
                sequences: batch,
                ragged: false,
                states: self.inputs.row(SEQUENCES, batch)?,
                offsets: self.inputs.row(OFFSETS, batch + 1)?,
                keys: Keys::Rows { sequences: 0..batch, visible },
                spans: &[],
            };
            let step = Step {
                stream,
                ropes: &self.ropes,
                tokens: batch,
                ids: self.inputs.row(IDS, batch)?,
                positions: self.inputs.row(POSITIONS, batch)?,
                slots: self.inputs.row(SLOTS, batch)?,
                groups: &[Some(group)],
                visual: None,
                adapted: None,
            };
            let logits = LogitArgs { tokens: None, out: self.logits.view_mut().slice(0, 0..batch)? };
            let decoder = self.model.decoder();
            self.decode.run(&step, decoder, &mut self.caches, Some(logits), observe)
        };
        match observe {
            Some(observe) => run(&self.stream, Some(observe))?,
            // SAFETY: all of it is the session's own, or the model's, which live as long as the recording; the stream
            // is the session's only one.
            None => unsafe {
                self.decode_graph.run(&self.stream, |stream| run(stream, None))?;
            },
        }
        self.torn.fill(false);
        for len in &mut self.lens {
            *len += 1;
        }
        self.logit_rows = 0..batch;
        self.prefilled = None;
        self.logits()
    }

    /// The logits of the last call: `[1, vocab]` of a prompt's last token, `[batch, vocab]` after a decode step, no
    /// rows before either. They are overwritten by the next call.
    pub fn logits(&self) -> Result<LogitRows<'_>, Error> {
        let view = self.logits.view().slice(0, self.logit_rows.clone())?;
        Ok(LogitRows { view, stream: &self.stream })
    }

    /// The sequence of a row of [`Self::logits`].
    pub(super) fn sequence_of(&self, row: usize) -> usize {
        self.prefilled.unwrap_or(row)
    }

    /// By how much the position of a sequence's next token is behind its number.
    fn shift(&self, sequence: usize) -> usize {
        self.shifts[sequence].last().map_or(0, |&(_, shift)| shift)
    }

    /// Placeholders stand for features of images, which a prompt of text has not.
    fn check_is_text(&self, ids: &[u32]) -> Result<(), Error> {
        let Some(vision) = &self.model.config().vision else { return Ok(()) };
        match ids.iter().position(|&id| id == vision.image_token || id == vision.video_token) {
            None => Ok(()),
            Some(token) => {
                let got = format!("none, and a placeholder at token {token}");
                Err(Error::invalid(OP, "visuals", "an image or frame for each run of placeholders", got))
            }
        }
    }

    fn check_room(&self, sequence: usize, tokens: usize) -> Result<(), Error> {
        let (len, capacity) = (self.lens[sequence], self.options.capacity);
        let room = capacity.saturating_sub(len);
        if tokens <= room {
            return Ok(());
        }
        let expected = format!(
            "at most {room} more tokens in sequence {sequence} (its cache holds {len} of {capacity})"
        );
        Err(Error::invalid(OP, "ids", expected, tokens.to_string()))
    }
}

/// What a step reads that differs from step to step, in device memory, so that a recorded step reads the new values.
#[derive(Debug)]
struct Inputs {
    /// `[6, width]` u32.
    rows: Tensor,
}

/// Rows of [`Inputs`].
const IDS: usize = 0;
const POSITIONS: usize = 1;
const SLOTS: usize = 2;
const LENS: usize = 3;
const SEQUENCES: usize = 4;
const OFFSETS: usize = 5;
/// How many there are.
const ROWS: usize = 6;

impl Inputs {
    fn new(stream: &Stream, width: usize) -> Result<Self, Error> {
        Ok(Inputs { rows: Tensor::empty(stream, &[ROWS, width], DType::U32)? })
    }

    fn row(&self, row: usize, len: usize) -> Result<TensorView<'_>, Error> {
        self.rows.view().slice(0, row..row + 1)?.slice(1, 0..len)?.reshape(&[len])
    }

    /// Uploads all rows in one copy. Each of the sequences has as many of the tokens.
    fn set(
        &mut self,
        stream: &Stream,
        ids: &[u32],
        positions: impl Iterator<Item = u32>,
        slots: impl Iterator<Item = usize>,
        lens: &[u32],
        sequences: Range<usize>,
    ) -> Result<(), Error> {
        let width = self.rows.shape()[1];
        let mut values = vec![0u32; ROWS * width];
        let mut fill = |row: usize, from: &mut dyn Iterator<Item = u32>| {
            for (slot, value) in std::iter::zip(&mut values[row * width..(row + 1) * width], from) {
                *slot = value;
            }
        };
        fill(IDS, &mut ids.iter().copied());
        fill(POSITIONS, &mut { positions });
        fill(SLOTS, &mut slots.map(|slot| slot as u32));
        fill(LENS, &mut lens.iter().copied());
        let (batch, tokens) = (sequences.len(), ids.len());
        fill(SEQUENCES, &mut sequences.map(|sequence| sequence as u32));
        fill(OFFSETS, &mut (0..=batch).map(|sequence| (sequence * tokens / batch) as u32));
        self.rows.view_mut().write(stream, &values)
    }
}

//! Choosing the next tokens of a batch's sequences, each by its own settings.

use abi::DType;

use super::Batch;
use host::ops::sampling::{
    Logprobs, NO_TOKEN, PARAMS_LEN, Sampler, SamplingArgs, SamplingBias, SamplingFeatures, SamplingParams,
    SamplingProblem,
};
use host::{Error, Stream, Tensor, TensorView};

const OP: &str = "BatchSampler";

/// How the token of a row of logits is chosen.
#[derive(Clone, Copy, Debug, Default)]
pub struct RowSampling<'a> {
    /// The row.
    pub row: usize,
    /// Temperature, penalties, seed, step and so on. `history_len`, `num_bias` and `is_masked` are set from the fields
    /// below; `prompt_len` is how many of the history's first tokens are the prompt's.
    pub params: SamplingParams,
    /// The sequence's tokens up to the row's, prompt and answer: what penalties look at. May be left out without them.
    pub history: &'a [u32],
    /// What is added to the logits of some tokens, no two the same.
    pub bias: &'a [(u32, f32)],
    /// Which tokens are allowed: bit `i % 32` of word `i / 32` allows token `i`. None: all.
    pub allowed: Option<&'a [u32]>,
    /// Whether log-probabilities are asked for.
    pub logprobs: bool,
}

/// The token of a row.
#[derive(Clone, Debug, PartialEq)]
pub struct ChosenToken {
    /// The token, or [`NO_TOKEN`] where no logit is a number or none is allowed.
    pub token: u32,
    /// Its log-probability and the most probable tokens with theirs, if they were asked for. They are of the logits as
    /// the model gives them, as in OpenAI's API: without temperature, penalties, bias and mask.
    pub logprobs: Option<TokenLogprobs>,
}

/// Natural logarithms of probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token that was chosen.
    pub chosen: f32,
    /// The most probable tokens, in descending order, equal ones by index: as many as the sampler's features say.
    pub top: Vec<(u32, f32)>,
}

/// A plan, and what it can do.
#[derive(Debug)]
struct Kind {
    problem: SamplingProblem,
    plan: Sampler,
}

/// Where log-probabilities go.
#[derive(Debug)]
struct LogprobTensors {
    chosen: Tensor,
    top_ids: Tensor,
    top: Tensor,
}

/// Chooses tokens from a batch's logits: greedy rows beside random ones, with penalties, biases and masks of their own,
/// in one run of [`Sampler`](host::ops::sampling::Sampler).
///
/// What all rows of a run pay for is only what some row of it asks for, in steps: the largest logits; draws; all that
/// the features have, without and with log-probabilities. The token of a row does not depend on that.
///
/// Histories stay on the device: of each only what differs from the row's last one is uploaded.
#[derive(Debug)]
pub struct BatchSampler {
    /// From the cheapest on, each with more than those before.
    kinds: Vec<Kind>,
    params: Tensor,
    ids: Tensor,
    history: Option<Tensor>,
    /// What it holds.
    uploaded: Vec<Vec<u32>>,
    bias: Option<(Tensor, Tensor)>,
    masks: Option<Tensor>,
    logprobs: Option<LogprobTensors>,
    rows: Vec<SamplingParams>,
    words: Vec<u32>,
    /// Whether the last run wrote log-probabilities.
    has_logprobs: bool,
}

impl BatchSampler {
    /// For the logits of a batch, with what its rows may ask for. All memory is taken here.
    ///
    /// **Errors**: those of [`Sampler::plan`](host::ops::sampling::Sampler::plan), and of memory.
    pub fn new(batch: &Batch, features: SamplingFeatures) -> Result<Self, Error> {
        let (rows, stream) = (batch.options().logit_rows(), batch.stream());
        let vocab = batch.model().config().decoder.vocab_size;
        let SamplingFeatures { draws, top_k, top_p, logprobs, .. } = features;
        let random = SamplingFeatures { draws, top_k, top_p, ..SamplingFeatures::GREEDY };
        let silent = SamplingFeatures { logprobs: None, ..features };
        let mut kinds: Vec<Kind> = Vec::new();
        for features in [SamplingFeatures::GREEDY, random, silent, features] {
            if kinds.iter().all(|kind| kind.problem.features != features) {
                let problem = SamplingProblem { rows, vocab, dtype: DType::F32, features };
                kinds.push(Kind { problem, plan: Sampler::plan(batch.model().device(), problem)? });
            }
        }
        let tensor = |width: usize, dtype| Tensor::empty(stream, &[rows, width], dtype);
        let some = |width: usize, dtype| (width > 0).then(|| tensor(width, dtype)).transpose();
        let line = |dtype| Tensor::empty(stream, &[rows], dtype);
        let logprobs = logprobs
            .map(|top| {
                let (chosen, top_ids, top) =
                    (line(DType::F32)?, tensor(top, DType::U32)?, tensor(top, DType::F32)?);
                Ok::<_, Error>(LogprobTensors { chosen, top_ids, top })
            })
            .transpose()?;
        let bias = some(features.bias, DType::U32)?;
        Ok(BatchSampler {
            params: tensor(PARAMS_LEN, DType::U32)?,
            ids: line(DType::U32)?,
            history: some(features.history, DType::U32)?,
            uploaded: vec![Vec::new(); if features.history > 0 { rows } else { 0 }],
            bias: bias.map(|ids| Ok::<_, Error>((ids, tensor(features.bias, DType::F32)?))).transpose()?,
            masks: some(if features.masks { vocab.div_ceil(32) } else { 0 }, DType::U32)?,
            logprobs,
            kinds,
            rows: Vec::new(),
            words: Vec::new(),
            has_logprobs: false,
        })
    }

    /// The tokens of these rows of a step's logits, in the order of `asked`; waits for them.
    ///
    /// **Errors**: [`Error::Invalid`] for a row that there is not or that is asked for twice, for what the features do
    /// not have, and for what the operator refuses, with the row; nothing was run then.
    pub fn choose(
        &mut self,
        stream: &Stream,
        logits: TensorView<'_>,
        asked: &[RowSampling<'_>],
    ) -> Result<Vec<ChosenToken>, Error> {
        self.enqueue(stream, logits, asked)?;
        self.read(stream, asked)
    }

    /// The first half of [`Self::choose`], which puts the work into the stream: the host may do other things while it
    /// runs.
    ///
    /// **Errors**: those of [`Self::choose`].
    pub fn enqueue(
        &mut self,
        stream: &Stream,
        logits: TensorView<'_>,
        asked: &[RowSampling<'_>],
    ) -> Result<(), Error> {
        // Of a run that comes to its end.
        self.has_logprobs = false;
        let rows = logits.shape()[0];
        let asks_logprobs = asked.iter().any(|row| row.logprobs);
        self.set_rows(rows, asked)?;
        let mut needed = SamplingFeatures::of(&self.rows);
        // Penalties of an empty history do nothing, but a plan without histories refuses them.
        needed.history = needed.history.max(usize::from(self.rows.iter().any(is_penalised)));
        let can = |kind: &Kind| {
            let has = &kind.problem.features;
            let has_logprobs = !asks_logprobs || has.logprobs.is_some();
            has_logprobs && covers(has, &needed)
        };
        // The last one says what it cannot do.
        let last = self.kinds.len() - 1;
        let which = self.kinds.iter().position(can).unwrap_or(last);
        let kind = &self.kinds[which];
        let features = kind.problem.features;
        if asks_logprobs && features.logprobs.is_none() {
            return Err(Error::invalid(OP, "logprobs", "none, as the features are without", "some"));
        }
        self.words.clear();
        self.words.resize(rows * PARAMS_LEN, 0);
        kind.problem.write_params(&self.rows, &mut self.words)?;

        let mut args = SamplingArgs::new(logits, self.ids.view_mut().slice(0, 0..rows)?);
        if features != SamplingFeatures::GREEDY {
            let mut params = self.params.view_mut().slice(0, 0..rows)?;
            params.write(stream, &self.words)?;
            args.params = Some(self.params.view().slice(0, 0..rows)?);
        }
        let edits = features.history > 0 || features.bias > 0 || features.masks;
        if edits {
            Self::upload(
                stream,
                asked,
                &self.rows,
                &mut self.history,
                &mut self.uploaded,
                &mut self.bias,
                &mut self.masks,
            )?;
            args.history = first_rows(self.history.as_ref(), rows)?;
            args.masks = first_rows(self.masks.as_ref(), rows)?;
            if let Some((ids, values)) = &self.bias {
                let (ids, values) = (ids.view().slice(0, 0..rows)?, values.view().slice(0, 0..rows)?);
                args.bias = Some(SamplingBias { ids, values });
            }
        }
        if features.logprobs.is_some()
            && let Some(LogprobTensors { chosen, top_ids, top }) = &mut self.logprobs
        {
            args.logprobs = Some(Logprobs {
                chosen: chosen.view_mut().slice(0, 0..rows)?,
                top_ids: top_ids.view_mut().slice(0, 0..rows)?,
                top: top.view_mut().slice(0, 0..rows)?,
            });
        }
        kind.plan.run(stream, args)?;
        self.has_logprobs = asks_logprobs;
        Ok(())
    }

    /// The other half: the tokens of rows of the last [`Self::enqueue`], in the order of `asked`; waits for them.
    ///
    /// **Errors**: [`Error::Invalid`] for a row that it had not, or log-probabilities that it was not asked for.
    pub fn read(&self, stream: &Stream, asked: &[RowSampling<'_>]) -> Result<Vec<ChosenToken>, Error> {
        let rows = self.rows.len();
        if let Some(own) = asked.iter().find(|own| own.row >= rows) {
            return Err(Error::invalid(OP, "row", format!("one of {rows} rows"), own.row.to_string()));
        }
        let asks_logprobs = asked.iter().any(|row| row.logprobs);
        if asks_logprobs && !self.has_logprobs {
            return Err(Error::invalid(OP, "logprobs", "none, as none were asked for", "some"));
        }
        let ids: Vec<u32> = self.ids.view().slice(0, 0..rows)?.to_vec(stream)?;
        let found = match &self.logprobs {
            Some(LogprobTensors { chosen, top_ids, top }) if asks_logprobs => {
                let chosen: Vec<f32> = chosen.view().slice(0, 0..rows)?.to_vec(stream)?;
                let top_ids: Vec<u32> = top_ids.view().slice(0, 0..rows)?.to_vec(stream)?;
                let top: Vec<f32> = top.view().slice(0, 0..rows)?.to_vec(stream)?;
                Some((chosen, top_ids, top))
            }
            _ => None,
        };
        let of_row = |own: &RowSampling<'_>| {
            let row = own.row;
            let logprobs = found.as_ref().filter(|_| own.logprobs).map(|(chosen, top_ids, top)| {
                let width = top.len() / rows;
                let places = row * width..(row + 1) * width;
                let pairs = std::iter::zip(&top_ids[places.clone()], &top[places]);
                let top = pairs.filter(|&(&id, _)| id != NO_TOKEN).map(|(&id, &value)| (id, value)).collect();
                TokenLogprobs { chosen: chosen[row], top }
            });
            ChosenToken { token: ids[row], logprobs }
        };
        Ok(asked.iter().map(of_row).collect())
    }

    /// The parameters of all rows; those that nobody asks for are greedy.
    fn set_rows(&mut self, rows: usize, asked: &[RowSampling<'_>]) -> Result<(), Error> {
        let most = self.kinds[0].problem.rows;
        if rows > most {
            let expected = format!("logits of at most {most} rows");
            return Err(Error::invalid(OP, "logits", expected, rows.to_string()));
        }
        let words = self.kinds[0].problem.vocab.div_ceil(32);
        self.rows.clear();
        self.rows.resize(rows, SamplingParams::default());
        let mut seen = vec![false; rows];
        for own in asked {
            let row = own.row;
            if row >= rows || std::mem::replace(&mut seen[row], true) {
                let expected = format!("each of {rows} rows at most once");
                return Err(Error::invalid(OP, "row", expected, row.to_string()));
            }
            if let Some(allowed) = own.allowed
                && allowed.len() != words
            {
                let expected = format!("{words} words in row {row}");
                return Err(Error::invalid(OP, "allowed", expected, allowed.len().to_string()));
            }
            // Without penalties the history is of no account.
            let params = own.params;
            let is_penalised = is_penalised(&params);
            let history = if is_penalised { own.history.len() } else { 0 };
            let count = |len: usize, name: &'static str| {
                u32::try_from(len).map_err(|_| Error::invalid(OP, name, "less than 2^32", len.to_string()))
            };
            self.rows[row] = SamplingParams {
                history_len: count(history, "history")?,
                prompt_len: if is_penalised { params.prompt_len } else { 0 },
                num_bias: count(own.bias.len(), "bias")?,
                is_masked: own.allowed.is_some(),
                ..params
            };
        }
        Ok(())
    }

    fn upload(
        stream: &Stream,
        asked: &[RowSampling<'_>],
        rows: &[SamplingParams],
        history: &mut Option<Tensor>,
        uploaded: &mut [Vec<u32>],
        bias: &mut Option<(Tensor, Tensor)>,
        masks: &mut Option<Tensor>,
    ) -> Result<(), Error> {
        fn part<T: host::Element>(
            tensor: &mut Tensor,
            stream: &Stream,
            row: usize,
            first: usize,
            data: &[T],
        ) -> Result<(), Error> {
            let mut view = tensor.view_mut().slice(0, row..row + 1)?.slice(1, first..first + data.len())?;
            view.write(stream, data)
        }
        for own in asked {
            let row = own.row;
            if let (Some(history), true) = (history.as_mut(), rows[row].history_len > 0) {
                let before = &mut uploaded[row];
                let same = std::iter::zip(&*before, own.history).take_while(|(a, b)| a == b).count();
                // Not to be relied upon if the upload fails.
                before.truncate(same);
                if same < own.history.len() {
                    part(history, stream, row, same, &own.history[same..])?;
                    before.extend(&own.history[same..]);
                }
            }
            if let (Some((ids, values)), false) = (bias.as_mut(), own.bias.is_empty()) {
                let (tokens, added): (Vec<u32>, Vec<f32>) = own.bias.iter().copied().unzip();
                part(ids, stream, row, 0, &tokens)?;
                part(values, stream, row, 0, &added)?;
            }
            if let (Some(masks), Some(allowed)) = (masks.as_mut(), own.allowed) {
                part(masks, stream, row, 0, allowed)?;
            }
        }
        Ok(())
    }
}

/// Whether a row looks at its history.
pub(crate) fn is_penalised(params: &SamplingParams) -> bool {
    params.repetition_penalty != 1.0 || params.presence_penalty != 0.0 || params.frequency_penalty != 0.0
}

fn first_rows(tensor: Option<&Tensor>, rows: usize) -> Result<Option<TensorView<'_>>, Error> {
    tensor.map(|tensor| tensor.view().slice(0, 0..rows)).transpose()
}

/// Whether a plan with some features can do what rows ask for.
fn covers(has: &SamplingFeatures, needed: &SamplingFeatures) -> bool {
    let flags = [
        (has.draws, needed.draws),
        (has.top_k, needed.top_k),
        (has.top_p, needed.top_p),
        (has.typical_p, needed.typical_p),
        (has.masks, needed.masks),
    ];
    flags.iter().all(|&(has, needed)| has || !needed)
        && needed.history <= has.history
        && needed.bias <= has.bias
}

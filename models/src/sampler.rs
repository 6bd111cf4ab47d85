//! Choosing the next tokens from a session's logits.

use abi::DType;

use super::batch::is_penalised;
use super::{ModelError, Session};
use host::Error;
use host::Tensor;
use host::ops::sampling::{
    self, NO_TOKEN, PARAMS_LEN, SamplingArgs, SamplingFeatures, SamplingParams, SamplingProblem,
};

/// Draws the next token of every sequence of a session, each time with a new random number.
#[derive(Debug)]
pub struct SessionSampler {
    problem: SamplingProblem,
    plan: sampling::Sampler,
    /// Of each sequence.
    params: Vec<SamplingParams>,
    /// Those of the rows of a call, there and here; none where all are greedy.
    table: Tensor,
    words: Vec<u32>,
    /// `[rows, capacity]` u32: the tokens of each row's sequence, if penalties look at them.
    history: Option<Tensor>,
    ids: Tensor,
    step: u64,
}

impl SessionSampler {
    /// A sampler for sessions of this one's model and batch size: each sequence by the same parameters, but for its
    /// seed, which is greater by its index.
    ///
    /// **Errors**: as [`Self::of_sequences`].
    pub fn new(session: &Session, params: SamplingParams) -> Result<Self, Error> {
        let of = |sequence| SamplingParams { seed: params.seed.wrapping_add(sequence), ..params };
        Self::of_sequences(session, (0..session.options().batch as u64).map(of).collect())
    }

    /// [`Self::new`] with parameters of its own for each sequence. Their steps are counted here, beginning at 0.
    ///
    /// **Errors**: [`Error::Invalid`] for parameters that the operator refuses, for those of a bias or mask, and for
    /// another number than the session has sequences.
    pub fn of_sequences(session: &Session, params: Vec<SamplingParams>) -> Result<Self, Error> {
        let (rows, vocab) = (session.options().batch, session.model().config().decoder.vocab_size);
        if params.len() != rows {
            let expected = format!("those of {rows} sequences");
            return Err(Error::invalid("SessionSampler", "params", expected, params.len().to_string()));
        }
        let history = if params.iter().any(is_penalised) { session.options().capacity } else { 0 };
        let features = SamplingFeatures { history, bias: 0, masks: false, ..SamplingFeatures::of(&params) };
        let problem = SamplingProblem { rows, vocab, dtype: DType::F32, features };
        let mut words = vec![0; rows * PARAMS_LEN];
        problem.write_params(&params, &mut words)?;
        let plan = sampling::Sampler::plan(session.model().device(), problem)?;
        let [table, ids] = [&[rows, PARAMS_LEN][..], &[rows]]
            .map(|shape| Tensor::empty(session.stream(), shape, DType::U32));
        let tokens = || Tensor::empty(session.stream(), &[rows, history], DType::U32);
        let history = (history > 0).then(tokens).transpose()?;
        Ok(SessionSampler { problem, plan, params, table: table?, words, history, ids: ids?, step: 0 })
    }

    /// The next tokens, from the logits of the session's last call; waits for them.
    ///
    /// **Errors**: [`Error::Invalid`] before the first call of the session and after one that failed, and for
    /// penalties, which need [`Self::sample_behind`]; [`ModelError::NanLogits`] where a sequence has no logit that is a
    /// number.
    pub fn sample(&mut self, session: &Session) -> Result<Vec<u32>, Error> {
        self.sample_behind(session, &[])
    }

    /// The same, with the tokens of each of the session's sequences, prompt and answer: what penalties look at. Of a
    /// sampler without penalties they are of no account.
    ///
    /// **Errors**: as [`Self::sample`], and [`Error::Invalid`] for another number of histories than the session has
    /// sequences, or one longer than its capacity.
    pub fn sample_behind(&mut self, session: &Session, histories: &[&[u32]]) -> Result<Vec<u32>, Error> {
        let sequences = self.params.len();
        if self.history.is_some() && histories.len() != sequences {
            let expected = format!("the tokens of each of {sequences} sequences, as there are penalties");
            let got = histories.len().to_string();
            return Err(Error::invalid("SessionSampler", "histories", expected, got));
        }
        let (stream, logits) = (session.stream(), session.logits()?.view());
        let rows = logits.shape()[0];
        if rows == 0 {
            let got = "a session without logits";
            return Err(Error::invalid(
                "SessionSampler",
                "session",
                "a prompt or a decode step that went well",
                got,
            ));
        }
        let ids = self.ids.view_mut().slice(0, 0..rows)?;
        let args = SamplingArgs::new(logits, ids);
        if self.problem.features != SamplingFeatures::GREEDY {
            let words = &mut self.words[..rows * PARAMS_LEN];
            for (row, words) in words.chunks_exact_mut(PARAMS_LEN).enumerate() {
                let sequence = session.sequence_of(row);
                let mut params = SamplingParams { step: self.step, ..self.params[sequence] };
                if let Some(history) = &mut self.history {
                    let tokens = histories[sequence];
                    params.history_len = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
                    self.problem.write_params(&[params], words)?;
                    let row = history.view_mut().slice(0, row..row + 1)?;
                    row.slice(1, 0..tokens.len())?.write(stream, tokens)?;
                } else {
                    self.problem.write_params(&[params], words)?;
                }
            }
            let mut table = self.table.view_mut().slice(0, 0..rows)?;
            table.write(stream, words)?;
            let history = self.history.as_ref().map(|history| history.view().slice(0, 0..rows));
            let history = history.transpose()?;
            self.plan.run(stream, SamplingArgs { params: Some(table.as_view()), history, ..args })?;
        } else {
            self.plan.run(stream, args)?;
        }
        self.step += 1;
        let ids: Vec<u32> = self.ids.view().slice(0, 0..rows)?.to_vec(stream)?;
        match ids.iter().position(|&id| id == NO_TOKEN) {
            Some(row) => {
                let sequence = session.sequence_of(row);
                Err(ModelError::NanLogits { sequence, dtype: session.model().dtype() }.into())
            }
            None => Ok(ids),
        }
    }
}

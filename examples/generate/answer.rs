//! Tokens after tokens: the prompt's, and those that the model writes.

use std::time::{Duration, Instant};

use text::{Codec, StreamedText};
use warpforge::Stream;
use warpforge::models::{Session, SessionSampler, Visual};

use crate::check::Check;
use crate::interrupt;
use crate::output::{self, Failure};
use crate::ranks::Followers;

/// A session that writes, and what it needs for that.
pub struct Writer<'a> {
    pub session: Session,
    pub sampler: SessionSampler,
    pub codec: Option<&'a Codec>,
    pub eos: &'a [u32],
    pub max_new_tokens: usize,
    /// Whether text is written while it comes.
    pub is_shown: bool,
    /// Looks at every tensor.
    pub check: Option<Check>,
    /// The other devices of a group.
    pub followers: Followers,
    stream: Stream,
    /// Those that the session has.
    tokens: Vec<u32>,
}

/// What came of it.
pub struct Answer {
    /// The new tokens, the one that ends them included.
    pub ids: Vec<u32>,
    pub is_interrupted: bool,
    pub time: Duration,
}

impl<'a> Writer<'a> {
    pub fn new(session: Session, sampler: SessionSampler, codec: Option<&'a Codec>, eos: &'a [u32]) -> Self {
        let stream = session.stream().clone();
        let (is_shown, check, followers) = (true, None, Followers::default());
        Writer {
            session,
            sampler,
            codec,
            eos,
            max_new_tokens: 0,
            is_shown,
            check,
            followers,
            stream,
            tokens: Vec::new(),
        }
    }

    /// As [`Session::truncate`] of its sequence, at all devices.
    pub fn truncate(&mut self, len: usize) -> Result<(), warpforge::Error> {
        self.followers.truncate(len);
        self.session.truncate(0, len)?;
        self.tokens.truncate(len);
        Ok(())
    }

    /// Runs a prompt, and shows its logits. Returns how long it took.
    pub fn read(
        &mut self,
        ids: &[u32],
        visuals: &[Visual<'_>],
        logits: &mut dyn FnMut(Vec<f32>),
        wants_logits: bool,
    ) -> Result<Duration, Failure> {
        let started = Instant::now();
        self.followers.prefill(ids, visuals);
        let (stream, check) = (&self.stream, std::cell::RefCell::new(&mut self.check));
        self.session.prefill_visual_with(
            0,
            ids,
            visuals,
            &mut |observed, tensor| match &mut **check.borrow_mut() {
                Some(check) => check.look(stream, observed, tensor),
                None => Ok(()),
            },
            &mut |_, rows| {
                if let Some(check) = &mut **check.borrow_mut() {
                    check.look_at_logits(stream, rows)?;
                }
                if wants_logits {
                    logits(rows.to_vec::<f32>(stream)?);
                }
                Ok(())
            },
        )?;
        self.stream.synchronize()?;
        self.tokens.extend(ids);
        self.checked()?;
        Ok(started.elapsed())
    }

    /// Writes an answer: up to a token that ends it, the most tokens, or Ctrl-C.
    pub fn write(&mut self) -> Result<Answer, Failure> {
        let answer = interrupt::Answer::begin();
        let mut text = StreamedText::new(self.codec);
        let mut ids = Vec::new();
        let started = Instant::now();
        while ids.len() < self.max_new_tokens && !answer.is_interrupted() {
            let chosen = self.sampler.sample_behind(&self.session, &[&self.tokens]);
            let id = chosen.map_err(|error| self.with_advice(error))?[0];
            ids.push(id);
            if self.eos.contains(&id) {
                break;
            }
            if self.is_shown {
                output::write(format_args!("{}", output::for_reader(text.push(id)?)))?;
            }
            if ids.len() < self.max_new_tokens {
                self.decode(id)?;
            }
        }
        self.stream.synchronize()?;
        let time = started.elapsed();
        if self.is_shown {
            output::write(format_args!("{}\n", output::for_reader(text.finish()?)))?;
        }
        Ok(Answer { ids, is_interrupted: answer.is_interrupted(), time })
    }

    fn decode(&mut self, id: u32) -> Result<(), Failure> {
        self.followers.decode(id);
        let (stream, Some(check)) = (&self.stream, &mut self.check) else {
            self.session.decode(&[id])?;
            self.tokens.push(id);
            return Ok(());
        };
        let logits =
            self.session.decode_with(&[id], &mut |which, tensor| check.look(stream, which, tensor))?;
        check.look_at_logits(stream, logits.view())?;
        self.tokens.push(id);
        self.checked()
    }

    fn checked(&self) -> Result<(), Failure> {
        Ok(self.check.as_ref().map_or(Ok(()), Check::end)?)
    }

    fn with_advice(&self, error: warpforge::Error) -> Failure {
        match warpforge::models::ModelError::of(&error) {
            Some(warpforge::models::ModelError::NanLogits { .. }) if self.check.is_none() => {
                format!("{error}; --check says where the first one is from").into()
            }
            _ => error.into(),
        }
    }
}

/// The figures of an answer.
pub fn print_speed(prompt: usize, prefill: Duration, new: usize, decode: Duration) {
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
    output::note(format_args!(
        "prompt: {prompt} tokens in {:.1} ms ({:.0} tokens/s); continuation: {new} tokens in {:.1} ms ({:.0} tokens/s)",
        prefill.as_secs_f64() * 1e3,
        rate(prompt, prefill),
        decode.as_secs_f64() * 1e3,
        rate(new, decode)
    ));
}
